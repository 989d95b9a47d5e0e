"""Is the difference real? Paired bootstrap over documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000


class Difference(NamedTuple):
    """Mean of a - b over sequences, its 95% interval, and the share of resamples in which it is not below 0.

    All sequences of one document say nothing of other documents: then there is no interval, and `not_below` is 1.
    """

    mean: float
    low: float | None
    high: float | None
    not_below: float

    @property
    def is_below(self) -> bool:
        """Whether the whole interval lies below 0."""
        return self.high is not None and self.high < 0


def paired_difference(a: np.ndarray, b: np.ndarray, documents: Sequence[str] | None = None) -> Difference:
    """The difference of two methods' numbers for the same sequences, in the same order.

    Sequences of one document resemble each other. So a resample draws whole documents, with all their sequences;
    `documents[n]` names the document of sequence n. By default every sequence is a document.

    >>> paired_difference(np.array([1.0, 2.0, 3.0]), np.array([2.0, 3.0, 4.0])).high
    -1.0
    >>> paired_difference(np.array([1.0, 2.0]), np.array([2.0, 3.0]), ["a book", "a book"])
    Difference(mean=-1.0, low=None, high=None, not_below=1.0)
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise ValueError(f"a and b must be numbers of the same sequences; got shapes {a.shape} and {b.shape}")
    if documents is not None and len(documents) != len(a):
        raise ValueError(f"documents must name the document of each of {len(a)} sequences; got {len(documents)} names")
    difference = a - b
    _, of = np.unique(np.arange(len(a)) if documents is None else np.asarray(documents), return_inverse=True)
    sizes, sums = np.bincount(of), np.bincount(of, difference)
    if documents is not None and len(sizes) == 1:
        return Difference(float(difference.mean()), None, None, 1.0)
    rng = np.random.default_rng(0)
    drawn = (rng.integers(0, len(sizes), (1000, len(sizes))) for _ in range(RESAMPLES // 1000))
    return _difference(difference.mean(), np.concatenate([sums[some].sum(1) / sizes[some].sum(1) for some in drawn]))


def mean_of_groups(differences: Sequence[np.ndarray]) -> Difference:
    """The mean of the groups' means: every group counts alike, however many differences it has.

    A resample draws from each group as many differences as it has.

    >>> mean_of_groups([np.array([-1.0, -1.0, -1.0]), np.array([-3.0])])
    Difference(mean=-2.0, low=-2.0, high=-2.0, not_below=0.0)
    """
    rng = np.random.default_rng(0)
    drawn = [group[rng.integers(0, len(group), (RESAMPLES, len(group)))].mean(1) for group in differences]
    return _difference(np.mean([group.mean() for group in differences]), np.mean(drawn, 0))


def _difference(mean: float | np.floating, resampled: np.ndarray) -> Difference:
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Difference(float(mean), float(low), float(high), float((resampled >= 0).mean()))


def holm(p: np.ndarray) -> np.ndarray:
    """Holm's correction for many comparisons: adjusted probabilities, in the given order."""
    p = np.asarray(p, np.float64)
    order = np.argsort(p, kind="stable")
    adjusted = np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order])
    out = np.empty_like(p)
    out[order] = np.minimum(adjusted, 1.0)
    return out
