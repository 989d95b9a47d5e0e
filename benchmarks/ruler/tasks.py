"""RULER's thirteen tasks by name, with its default parameters; two that it has not; and needles at every depth."""

from __future__ import annotations

from benchmarks.ruler import copying, counting, qa, words
from benchmarks.ruler.niah import Niah
from benchmarks.ruler.question import Task
from benchmarks.ruler.score import match_part, words_before_a_miss
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

# What RULER does not ask: for one of many sentences that are near copies of each other, and for a long passage again.
BEYOND = {
    "alike": _niah(Niah(key="pairs", keys=24)),
    "copy": Task(make=copying.copy, answer_tokens=2 * copying.ASKED, least=copying.ASKED, score=words_before_a_miss),
}

# The task of the picture: niah_single_2 with its needle at given depths, in percent.
NEEDLE = "needle"
NEEDLE_DEPTHS = tuple(range(0, 101, 10))


def needle_at(depth: int) -> Task:
    return _niah(Niah(depth=depth))
