"""How long the studies of one direction take, and how much of their work still fits the time left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import monotonic

from xsake._measure.ratio import FEWEST_ROUNDS
from xsake.autotune.problem import StudyPlan

FINALISTS = 2  # configurations that meet the heuristic's in the last race
FIRST_BATCH = 4  # configurations at most, before their compile time is known


class Pace:
    """Plans the time of one direction's studies up to `end` (monotonic clock), and reserves time for the last races.

    `budget_end`: the end of the whole run. `guess`: seconds to assume per configuration, until the first batch is done.
    """

    def __init__(self, end: float, budget_end: float, final_rounds: int, guess: float):
        self._end, self.budget_end, self._final_rounds, self._guess = end, budget_end, final_rounds, guess
        self._turn: dict[str, float] = {}  # seconds per contestant and round, by study
        self._longest = 0.0  # the largest sum of `_turn` over all studies
        self._part: float | None = None  # seconds per configuration in the latest batch

    def _left(self) -> float:
        return self._end - monotonic()

    def _last_races(self, rounds: int) -> float:
        return sum(self._turn.values()) * rounds * (1 + FINALISTS)

    @contextlib.contextmanager
    def batch(self, parts: int) -> Iterator[None]:
        start = monotonic()
        yield
        self._part = (monotonic() - start) / parts

    def affordable(self, most: int) -> int:
        """Configurations in the next batch: few in the first batch, then as many as there is time for, up to `most`."""
        left = self._left() - self._last_races(self._final_rounds)
        if left <= 0:
            return 0
        most = min(most, FIRST_BATCH) if self._part is None else most
        return most if left >= most * self._seconds_per_part else round(left / self._seconds_per_part)

    @property
    def _seconds_per_part(self) -> float:
        return self._guess if self._part is None else self._part

    @contextlib.contextmanager
    def race(self, plan: StudyPlan, contestants: int) -> Iterator[None]:
        start = monotonic()
        yield
        self._turn[str(plan.key)] = (monotonic() - start) / contestants  # the first race includes warm-up

    def is_over(self, end: float) -> bool:
        """Whether last races of few rounds need all the time until `end`, or the direction's end if that is later."""
        return max(end, self._end) - monotonic() <= self._last_races(FEWEST_ROUNDS)

    def least(self) -> float:
        """Seconds for one more configuration and the last races after it."""
        return self._seconds_per_part + self._longest * self._final_rounds * (1 + FINALISTS)

    def final_rounds(self, plan: StudyPlan) -> int:
        """Rounds of this study's last race: as many as asked for, or fewer so that all last races to come fit."""
        whole = self._last_races(1)
        self._longest = max(self._longest, sum(self._turn.values()))
        self._turn.pop(str(plan.key), None)
        affordable = self._left() / whole if whole else self._final_rounds
        return max(FEWEST_ROUNDS, int(min(self._final_rounds, affordable)))
