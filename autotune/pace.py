"""How long things take, and whether there is still time for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import monotonic

from xsake.autotune.problem import StudyPlan

FINALISTS = 2  # that meet the heuristic in the last race
FEWEST_ROUNDS = 3
FIRST_BATCH = 4  # nobody knows yet how long a configuration takes to compile


class Pace:
    """The time of one direction's studies, up to `end` on the monotonic clock. The last races are kept room for."""

    def __init__(self, end: float, final_rounds: int):
        self._end, self._final_rounds = end, final_rounds
        self._turn: dict[str, float] = {}  # seconds that a contestant takes in a round, by study
        self._longest = 0.0  # sum of them, before the last races
        self._part: float | None = None  # seconds that a configuration took in the last batch

    def _left(self) -> float:
        return self._end - monotonic()

    def _last_races(self, rounds: int) -> float:
        return sum(self._turn.values(), 0.0) * rounds * (1 + FINALISTS)

    @contextlib.contextmanager
    def batch(self, parts: int) -> Iterator[None]:
        start = monotonic()
        yield
        self._part = (monotonic() - start) / parts

    def affordable(self, most: int) -> int:
        """Configurations of the next batch: few at first, then as many as there is time for."""
        if self._part is None:
            return min(most, FIRST_BATCH)
        left = self._left() - self._last_races(self._final_rounds)
        return most if left >= most * self._part else max(0, round(left / self._part))

    @contextlib.contextmanager
    def race(self, plan: StudyPlan, contestants: int) -> Iterator[None]:
        start = monotonic()
        yield
        self._turn[str(plan.key)] = (monotonic() - start) / contestants  # of the first race it is too much

    def is_over(self, end: float | None = None) -> bool:
        """`end`: instead of its own."""
        left = self._left() if end is None else end - monotonic()
        return left <= self._last_races(FEWEST_ROUNDS)

    def least(self) -> float:
        """Seconds for one more configuration and the last races after it."""
        return (self._part or 0.0) + self._longest * self._final_rounds * (1 + FINALISTS)

    def final_rounds(self, plan: StudyPlan) -> int:
        """As many as asked for, or what the studies that still have theirs to come can all afford."""
        whole = self._last_races(1)
        self._longest = max(self._longest, sum(self._turn.values()))
        self._turn.pop(str(plan.key), None)
        affordable = self._left() / whole if whole else self._final_rounds
        return max(FEWEST_ROUNDS, int(min(self._final_rounds, affordable)))
