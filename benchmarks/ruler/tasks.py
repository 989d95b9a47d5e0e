"""The thirteen tasks by name, with RULER's default parameters; and needles at every depth, for the picture."""

from __future__ import annotations

from benchmarks.ruler import counting, qa, words
from benchmarks.ruler.niah import Niah
from benchmarks.ruler.question import Task
from benchmarks.ruler.score import match_part
from benchmarks.ruler.tracking import HOPS, track


def _niah(niah: Niah) -> Task:
    return Task(make=niah, answer_tokens=128, least=max(niah.keys * niah.values, 1))


def _qa(hops: int) -> Task:
    return Task(make=qa.Qa(hops), answer_tokens=32, least=hops, most=qa.documents_of, score=match_part)


TASKS = {
    "niah_single_1": _niah(Niah(haystack="noise")),
    "niah_single_2": _niah(Niah()),
    "niah_single_3": _niah(Niah(value="uuids")),
    "niah_multikey_1": _niah(Niah(keys=4)),
    "niah_multikey_2": _niah(Niah(haystack="needles")),
    "niah_multikey_3": _niah(Niah(haystack="needles", key="uuids", value="uuids")),
    "niah_multivalue": _niah(Niah(values=4)),
    "niah_multiquery": _niah(Niah(keys=4, asked=4)),
    "vt": Task(make=track, answer_tokens=30, least=HOPS + 1),
    "cwe": Task(
        make=counting.common_words,
        answer_tokens=120,
        least=2 * counting.COMMON,
        most=lambda essay: len(words.all_words()),
    ),
    "fwe": Task(make=counting.frequent_words, answer_tokens=counting.FREQUENT_TOKENS, least=100),
    "qa_1": _qa(1),
    "qa_2": _qa(2),
}

# The task of the picture: niah_single_2 with its needle at given depths, in percent.
NEEDLE = "needle"
NEEDLE_DEPTHS = tuple(range(0, 101, 10))


def needle_at(depth: int) -> Task:
    return _niah(Niah(depth=depth))
