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


def _plain(answer: str) -> str:
    return re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()
