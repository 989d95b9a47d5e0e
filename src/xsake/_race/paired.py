"""A call and the reference that it is timed against, in turns: the machine's own speed is in both, and cancels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from xsake._measure.interference import contention, disturbance
from xsake._measure.ratio import Ratio
from xsake._measure.timing import Timing, race_rounds


@dataclasses.dataclass(frozen=True)
class Paired:
    """Seconds of the call and of its reference in every round, and what disturbed them, or None."""

    call: list[float]
    reference: list[float]
    disturbed: str | None = None

    @classmethod
    def race(
        cls, call: Callable[[], Any], reference: Callable[[], Any], *, rounds: int, round_seconds: float
    ) -> Paired:
        with contention() as contended:
            found = race_rounds({"call": call, "reference": reference}, rounds=rounds, min_seconds=round_seconds)
        times = {f"the {who}": Timing.of(seconds) for who, seconds in found.items()}
        return cls(found["call"], found["reference"], disturbance(times, contended))

    def __add__(self, other: Paired) -> Paired:
        """The rounds of both."""
        return Paired(self.call + other.call, self.reference + other.reference, self.disturbed or other.disturbed)

    @property
    def ratios(self) -> list[float]:
        """The call's time over the reference's, round by round: within a round they run right after one another."""
        return [call / reference for call, reference in zip(self.call, self.reference, strict=True)]

    @property
    def ratio(self) -> Ratio:
        return Ratio.of(self.ratios)
