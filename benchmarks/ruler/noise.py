"""A line that says nothing, and needles among such lines."""

from __future__ import annotations

from collections.abc import Sequence

NOISE = "The road is long. The rain is soft. The hills are far. On we walk. Home and away again."


def insert(lines: Sequence[str], places: Sequence[int], needles: Sequence[str]) -> list[str]:
    """`lines` with each needle before the line of its place; places do not fall."""
    found: list[str] = []
    last = 0
    for place, needle in zip(places, needles, strict=True):
        found += [*lines[last:place], needle]
        last = place
    return found + list(lines[last:])
