"""How long things take, and whether there is still time for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import monotonic

from xsake.autotune.problem import StudyPlan

FINALISTS = 2  # that meet the heuristic in the last race
FEWEST_ROUNDS = 3


class Pace:
    """The time of one direction's studies, up to `end` on the monotonic clock. The last races are kept room for."""

    def __init__(self, end: float, final_rounds: int):
        self._end, self._final_rounds = end, final_rounds
        self._turn: dict[str, float] = {}  # seconds that a contestant takes in a round, by study
        self._batch: float | None = None

    def _left(self) -> float:
        return self._end - monotonic()

    def _last_races(self, rounds: int) -> float:
        return sum(self._turn.values(), 0.0) * rounds * (1 + FINALISTS)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        start = monotonic()
        yield
        self._batch = monotonic() - start

    def allows_batch(self) -> bool:
        """The first one always; another if about half of it can be done."""
        return self._batch is None or self._left() - self._last_races(self._final_rounds) > self._batch / 2

    @contextlib.contextmanager
    def race(self, plan: StudyPlan, contestants: int) -> Iterator[None]:
        start = monotonic()
        yield
        self._turn[str(plan.key)] = (monotonic() - start) / contestants  # of the first race it is too much

    def is_over(self) -> bool:
        return self._left() <= self._last_races(FEWEST_ROUNDS)

    def final_rounds(self, plan: StudyPlan) -> int:
        """As many as asked for, or what the studies that still have theirs to come can all afford."""
        whole = self._last_races(1)
        self._turn.pop(str(plan.key), None)
        affordable = self._left() / whole if whole else self._final_rounds
        return max(FEWEST_ROUNDS, int(min(self._final_rounds, affordable)))
