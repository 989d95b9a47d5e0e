"""The attention between every pair of blocks, estimated from pooled vectors with a head's calibrated weights."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.estimator import Estimator, bucket_of
from xsake.hads.selection.pooled import Pooled, spread_weights


def block_logits(pooled: Pooled, estimator: Estimator, grid: CausalGrid) -> Float[Array, "B H n n"]:
    """Unnormalised log mass; -inf where causality forbids."""
    b, h, n, width = pooled.query.shape
    kv_heads = pooled.key.shape[1]
    weighted = pooled.query * spread_weights(jnp.asarray(estimator.features))[None, :, None]
    # The default precision (TF32 on a GPU) is far finer than the error of the estimate.
    logits = jnp.einsum("bkgid,bkjd->bkgij", weighted.reshape(b, kv_heads, -1, n, width), pooled.key)
    bias = jnp.asarray(estimator.distance)[:, bucket_of(grid.distance())]
    bias = bias.at[:, :, 0].add(jnp.asarray(estimator.sink)[:, None])
    bias = bias[None] + jnp.asarray(estimator.tokens)[None, :, None, None] * pooled.tokens
    return jnp.where(grid.causal(), logits.reshape(b, h, n, n) + bias, -jnp.inf)


@partial(jax.jit, static_argnames="grid")
def block_mass(pooled: Pooled, estimator: Estimator, grid: CausalGrid) -> Float[Array, "B H n n"]:
    """Estimated mass, the counterpart of `BlockStatistics.share`: a row sums to 1."""
    return jax.nn.softmax(block_logits(pooled, estimator, grid), -1)
