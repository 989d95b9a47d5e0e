"""A ratio of times and how sure it is."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.99  # probability that an interval holds the true median
FEWEST_ROUNDS = math.ceil(1 - math.log2(1 - CONFIDENCE))  # with fewer, even the extremes are less sure


@dataclasses.dataclass(frozen=True)
class Ratio:
    """One program's time / another's: the median over paired rounds, and the interval from `low` to `high` that holds
    the true median with probability CONFIDENCE.

    The interval is the sign test's: it leaves out the k lowest and the k highest of n ratios, for the largest k with
    P(at most k heads in n tosses of a coin) <= (1 - CONFIDENCE) / 2. It assumes that rounds are independent, and
    nothing about the shape of their noise.
    """

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratio:
        """
        >>> Ratio.of([1.2, 1.4, 1.3, 0.9, 1.3, 1.2, 5.0, 1.3, 1.1, 1.3, 1.2, 1.3])
        Ratio(median=1.3, low=1.1, high=1.4, rounds=12)
        """
        n, ordered = len(ratios), sorted(ratios)
        if n < FEWEST_ROUNDS:
            raise ValueError(f"{n} rounds are too few for an interval: race {FEWEST_ROUNDS} at least")
        heads = [sum(math.comb(n, i) for i in range(k + 1)) / 2**n for k in range(n)]
        left_out = sum(chance <= (1 - CONFIDENCE) / 2 for chance in heads) - 1
        return cls(statistics.median(ordered), ordered[left_out], ordered[-1 - left_out], n)

    def over(self, other: Ratio) -> Ratio:
        """This ratio / another one that was measured apart from it: both intervals' noise is in the result's.

        >>> Ratio(1.2, 1.1, 1.3, 15).over(Ratio(1.0, 0.5, 2.0, 8))
        Ratio(median=1.2, low=0.55, high=2.6, rounds=8)
        """
        rounds = min(self.rounds, other.rounds)
        return Ratio(self.median / other.median, self.low / other.high, self.high / other.low, rounds)

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f} to {self.high:.2f} in {self.rounds} rounds)"
