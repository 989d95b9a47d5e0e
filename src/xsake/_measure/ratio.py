"""A speed-up and how sure it is."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.99  # probability that an interval holds the true median
FEWEST_ROUNDS = math.ceil(1 - math.log2(1 - CONFIDENCE))  # with fewer, even the extremes are less sure


@dataclasses.dataclass(frozen=True)
class Gain:
    """Heuristic's time / another configuration's time: the median over paired rounds, and the interval from `low` to
    `high` that holds the true median with probability CONFIDENCE.

    The interval is the sign test's: it leaves out the k lowest and the k highest of n ratios, for the largest k with
    P(at most k heads in n tosses of a coin) <= (1 - CONFIDENCE) / 2. It assumes that rounds are independent, and
    nothing about the shape of their noise.
    """

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Gain:
        """
        >>> Gain.of([1.2, 1.4, 1.3, 0.9, 1.3, 1.2, 5.0, 1.3, 1.1, 1.3, 1.2, 1.3])
        Gain(median=1.3, low=1.1, high=1.4, rounds=12)
        """
        n, ordered = len(ratios), sorted(ratios)
        if n < FEWEST_ROUNDS:
            raise ValueError(f"{n} rounds are too few for an interval: race {FEWEST_ROUNDS} at least")
        heads = [sum(math.comb(n, i) for i in range(k + 1)) / 2**n for k in range(n)]
        left_out = sum(chance <= (1 - CONFIDENCE) / 2 for chance in heads) - 1
        return cls(statistics.median(ordered), ordered[left_out], ordered[-1 - left_out], n)

    @property
    def is_shown(self) -> bool:
        """Whether the configuration is faster than the heuristic's, beyond the spread of the rounds."""
        return self.low > 1

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f} to {self.high:.2f} in {self.rounds} rounds)"
