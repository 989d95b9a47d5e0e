"""A program's time over that of others in the same rounds: the machine's own speed is in both, and cancels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from xsake._measure.interference import contention, disturbance
from xsake._measure.timing import Timing, race_rounds


@dataclasses.dataclass(frozen=True)
class Paired:
    """Seconds of each program in every round. The first program is the one that is judged."""

    seconds: dict[str, list[float]]
    disturbed: str | None

    @classmethod
    def race(cls, programs: Mapping[str, Callable[[], Any]], rounds: int, round_seconds: float) -> Paired:
        with contention() as contended:
            seconds = race_rounds(programs, rounds=rounds, min_seconds=round_seconds)
        times = {who: Timing.of(rounds_of) for who, rounds_of in seconds.items()}
        return cls(seconds, disturbance(times, contended))

    @property
    def times(self) -> dict[str, Timing]:
        return {who: Timing.of(rounds_of) for who, rounds_of in self.seconds.items()}

    def over(self, who: str) -> Timing:
        """The first program's time over another's, round by round: within a round they run right after one another."""
        first = next(iter(self.seconds.values()))
        return Timing.of([ours / theirs for ours, theirs in zip(first, self.seconds[who], strict=True)])
