"""The attention between every pair of blocks, estimated from pooled vectors with a head's calibrated weights."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from xsake.hads.causal_grid import CausalGrid
from xsake.hads.pooled import Pooled, spread_weights

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


def block_logits(pooled: Pooled, estimator: Estimator, grid: CausalGrid) -> Float[Array, "B H n n"]:
    """Unnormalised log mass; -inf where causality forbids."""
    b, h, n, width = pooled.query.shape
    kv_heads = pooled.key.shape[1]
    weighted = pooled.query * spread_weights(jnp.asarray(estimator.features))[:, None]
    # An estimate: the default precision (TF32 on a GPU) is far finer than what is left unknown.
    logits = jnp.einsum("bkgid,bkjd->bkgij", weighted.reshape(b, kv_heads, -1, n, width), pooled.key)
    bias = jnp.asarray(estimator.distance)[:, bucket_of(grid.distance())]
    bias = bias.at[:, :, 0].add(jnp.asarray(estimator.sink)[:, None])
    bias = bias + jnp.asarray(estimator.tokens)[:, None, None] * pooled.tokens
    return jnp.where(grid.causal(), logits.reshape(b, h, n, n) + bias, -jnp.inf)


@partial(jax.jit, static_argnames="grid")
def block_mass(pooled: Pooled, estimator: Estimator, grid: CausalGrid) -> Float[Array, "B H n n"]:
    """Estimated mass, the counterpart of `BlockStatistics.share`: a row sums to 1."""
    return jax.nn.softmax(block_logits(pooled, estimator, grid), -1)
