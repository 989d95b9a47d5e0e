"""Is the difference real? Paired bootstrap over sequences."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Difference(NamedTuple):
    """Mean of a - b over sequences, its 95% interval, and the share of resamples in which it is not below 0."""

    mean: float
    low: float
    high: float
    not_below: float


def paired_difference(a: np.ndarray, b: np.ndarray, *, resamples: int = 10_000, seed: int = 0) -> Difference:
    """The difference of two methods' numbers for the same sequences, in the same order.

    >>> paired_difference(np.array([1.0, 2.0, 3.0]), np.array([2.0, 3.0, 4.0])).high
    -1.0
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise ValueError(f"a and b must be numbers of the same sequences; got shapes {a.shape} and {b.shape}")
    difference = a - b
    rng = np.random.default_rng(seed)
    means = np.concatenate(
        [difference[rng.integers(0, len(a), (part, len(a)))].mean(1) for part in _parts(resamples, 1000)]
    )
    low, high = np.quantile(means, [0.025, 0.975])
    return Difference(float(difference.mean()), float(low), float(high), float((means >= 0).mean()))


def holm(p: np.ndarray) -> np.ndarray:
    """Holm's correction for many comparisons: adjusted probabilities, in the given order."""
    p = np.asarray(p, np.float64)
    order = np.argsort(p, kind="stable")
    adjusted = np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order])
    out = np.empty_like(p)
    out[order] = np.minimum(adjusted, 1.0)
    return out


def _parts(total: int, size: int) -> list[int]:
    return [min(size, total - at) for at in range(0, total, size)]
