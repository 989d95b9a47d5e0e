"""Estimator: a head's weights for the features from which the attention between blocks is estimated."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jax import Array
from jaxtyping import Float

# The pooled features, in the order of `Estimator.features`; `selection.pooled` has their formulas.
KINDS = ("mean", "keys", "queries", "bound")

# Distances in blocks at which a new bucket begins: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, ... 16384.
BUCKETS = np.array([0, 1, *sorted(start << p for start in (2, 3) for p in range(13)), 16384], np.int32)


class Estimator(NamedTuple):
    """A layer's calibrated weights. The estimate is the row softmax of

    sum of features * `features` + `tokens` * the tokens' feature + `distance[bucket of i - j]` + `sink` if j = 0
    """

    features: Float[Array | np.ndarray, "*H kinds pairs"]
    tokens: Float[Array | np.ndarray, "*H"]
    distance: Float[Array | np.ndarray, "*H buckets"]
    sink: Float[Array | np.ndarray, "*H"]


def bucket_of(distance: np.ndarray) -> np.ndarray:
    """The bucket of a distance in blocks; negative distances, which causality forbids, count as 0."""
    return np.searchsorted(BUCKETS, np.maximum(distance, 0), side="right") - 1
