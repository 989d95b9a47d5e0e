"""A task's question, and the material for it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

from benchmarks.ruler.essay import Essay
from benchmarks.ruler.score import match_all


@dataclasses.dataclass(frozen=True)
class Question:
    """One prompt: what the user says, how the answer begins, and what the rest of the answer should contain.

    `depth` is the share of the haystack that stands before the needle, where there is a single needle.
    """

    text: str
    lead: str
    answers: Sequence[str]
    depth: float | None = None


@dataclasses.dataclass(frozen=True)
class Draw:
    """The material of a question: `size` units of haystack for a prompt of at most `length` tokens."""

    rng: random.Random
    size: int
    length: int
    sample: int
    essay: Essay


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """`make` must use `size` units of haystack, from `least` to `most`: the prompt grows with it."""

    make: Callable[[Draw], Question]
    answer_tokens: int
    least: int = 1
    most: Callable[[Essay], int] = lambda essay: 10**7
    score: Callable[[str, Sequence[str]], float] = match_all
