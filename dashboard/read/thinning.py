"""Curves of bounded size whose extremes are kept: every bucket of steps gives its smallest and its largest value."""

from __future__ import annotations

import dataclasses

import numpy as np

MOST_BUCKETS = 4096  # per curve in memory


@dataclasses.dataclass(frozen=True)
class Points:
    """A curve: steps that rise strictly, the time spent in steps until then, and values (NaN where not finite)."""

    step: np.ndarray  # i64[n]
    time: np.ndarray  # f64[n]
    value: np.ndarray  # f64[n]

    def __len__(self) -> int:
        return len(self.step)

    def take(self, which: np.ndarray | slice) -> Points:
        return Points(self.step[which], self.time[which], self.value[which])

    @property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.step, self.time, self.value

    def between(self, first: int, last: int) -> Points:
        """The points of the steps from `first` to `last`, both included."""
        return self.take(slice(np.searchsorted(self.step, first), np.searchsorted(self.step, last, side="right")))


def joined(parts: list[Points]) -> Points:
    """Curves that follow one another, as one."""
    return Points(*(np.concatenate(columns) for columns in zip(*(part.columns for part in parts), strict=True)))


NONE = Points(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))


def thin(points: Points, bucket: int) -> Points:
    """The smallest and the largest value of every `bucket` steps, and the first value that is not finite.

    Thinning twice, with buckets of 2 and then of 4 steps, equals thinning once with buckets of 4.

    >>> steps = np.arange(6)
    >>> thin(Points(steps, steps * 0.5, np.array([5.0, 1, 2, 9, 3, 4])), 3).value.tolist()
    [5.0, 1.0, 9.0, 3.0]
    """
    if bucket <= 1 or not len(points):
        return points
    group = points.step // bucket
    starts = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    number = np.cumsum(np.concatenate([[True], group[1:] != group[:-1]])) - 1
    kept = np.zeros(len(points), bool)
    for extreme in (np.fmin, np.fmax):
        wanted = extreme.reduceat(points.value, starts)
        kept[_first_of_group(points.value == wanted[number], number)] = True
    kept[_first_of_group(np.isnan(points.value), number)] = True
    return points.take(kept)


def _first_of_group(mask: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Indices of the first True of each group; groups are numbered in order."""
    where = np.flatnonzero(mask)
    groups = number[where]
    return where[np.concatenate([[True], groups[1:] != groups[:-1]])] if len(where) else where


def fit(points: Points, most: int) -> tuple[Points, int]:
    """At most about `most` points, and the bucket (a power of two) that this took."""
    bucket = 1
    thinned = points
    while len(thinned) > most:
        bucket *= 2
        thinned = thin(thinned, bucket)
    return thinned, bucket


class Curve:
    """A curve that grows at its end and never takes more memory than `MOST_BUCKETS` buckets."""

    def __init__(self) -> None:
        self.bucket = 1
        self.points = NONE
        self.count = 0  # values that were added

    def add(self, new: Points) -> None:
        self.count += len(new)
        # The last bucket may go on: its points are thinned again together with the new ones.
        open_from = (
            np.searchsorted(self.points.step, self.points.step[-1] // self.bucket * self.bucket)
            if len(self.points)
            else 0
        )
        tail = joined([self.points.take(slice(int(open_from), None)), new])
        self.points = joined([self.points.take(slice(0, int(open_from))), thin(tail, self.bucket)])
        while len(self.points) > 2 * MOST_BUCKETS:
            self.bucket *= 2
            self.points = thin(self.points, self.bucket)
