"""RULER's scores of one answer, from 0 to 1."""

from __future__ import annotations

import re
from collections.abc import Sequence


def match_all(answer: str, references: Sequence[str]) -> float:
    """The share of the references that the answer contains, whatever their case.

    >>> match_all("They are Apple and pear.", ["apple", "pear", "plum", "fig"])
    0.5
    """
    said = _plain(answer)
    return sum(reference.lower() in said for reference in references) / len(references)


def match_part(answer: str, references: Sequence[str]) -> float:
    """1 if the answer contains any of the references, which are ways to say the same thing; else 0."""
    said = _plain(answer)
    return float(any(reference.lower() in said for reference in references))


def words_before_a_miss(answer: str, references: Sequence[str]) -> float:
    """The share of the reference's words that the answer says before it says another one.

    >>> words_before_a_miss("the old road of the hills", ["the old road to the hills"])
    0.5
    """
    said, wanted = answer.split(), references[0].split()
    misses = (n for n, (one, other) in enumerate(zip(said, wanted, strict=False)) if one != other)
    return next(misses, min(len(said), len(wanted))) / len(wanted)


def begins(answer: str, references: Sequence[str]) -> bool:
    """Whether the answer begins as a reference does: with its first word, or the first digit of its number.

    >>> begins(" 7301 is it", ["7999"]), begins("road", ["roads of"])
    (True, False)
    """
    said = re.findall(r"\d|[^\d\s]+", answer)[:1]
    return any(said == re.findall(r"\d|[^\d\s]+", reference)[:1] for reference in references)


def _plain(answer: str) -> str:
    return re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()
