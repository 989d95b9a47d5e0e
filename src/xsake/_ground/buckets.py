"""Buckets of sizes and densities: all calls of one bucket share a capacity or a tuned configuration."""

from __future__ import annotations

import math

_THINNEST = 2.0**-10  # all lower densities share the bucket of this one


def power_of_two_at_least(size: int) -> int:
    """Round up, so that `size` things fit.

    >>> [power_of_two_at_least(n) for n in (0, 1, 5, 8)]
    [1, 1, 8, 8]
    """
    return 1 << max(size - 1, 0).bit_length()


def nearest_power_of_two(size: int) -> int:
    """Round to the nearest in octaves, so that 5000 tokens count as 4096.

    >>> [nearest_power_of_two(n) for n in (1, 5, 6, 5000)]
    [1, 4, 8, 4096]
    """
    return 1 << round(math.log2(size))


def half_octaves(density: float) -> int:
    """The number of a density's bucket: 0 for 1, -2 for 0.5, -4 for 0.25."""
    return round(2 * math.log2(max(density, _THINNEST)))


def density_bucket(density: float) -> float:
    """The half-octave bucket that tuning is keyed by: 1, 0.707, 0.5, 0.354, 0.25, ... (never below 2**-10).

    >>> density_bucket(0.43)
    0.5
    """
    return round(2 ** (half_octaves(density) / 2), 4)
