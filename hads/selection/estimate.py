"""The attention between every pair of blocks, estimated from pooled vectors with a head's calibrated weights."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.estimator import Estimator, bucket_of
from xsake.hads.selection.exact import with_exact_rows
from xsake.hads.selection.pooled import Pooled, pool, spread_weights
from xsake.hads.selection.rows import Rows


def block_logits(pooled: Pooled, estimator: Estimator, grid: CausalGrid) -> Float[Array, "B H rows n"]:
    """Unnormalised log mass; -inf where causality forbids."""
    products, bias, tokens = logit_terms(pooled, estimator, grid)
    return jnp.where(grid.causal(), products + (bias + tokens), -jnp.inf)


def logit_terms(pooled: Pooled, estimator: Estimator, grid: CausalGrid, first: int = 0) -> tuple[Array, Array, Array]:
    """The terms of the rows' logits from row `first` on: products of features, bias by distance, the tokens' feature.

    Shapes are [B, H, rows, n]; the bias is the same for all sequences, [1, H, rows, n].
    """
    b, h, rows, width = pooled.query.shape
    kv_heads = pooled.key.shape[1]
    weighted = pooled.query * spread_weights(jnp.asarray(estimator.features))[None, :, None]
    # The default precision (TF32 on a GPU) is far finer than the error of the estimate.
    products = jnp.einsum("bkgid,bkjd->bkgij", weighted.reshape(b, kv_heads, -1, rows, width), pooled.key)
    bias = jnp.asarray(estimator.distance)[:, bucket_of(grid.distance()[first:])]
    bias = bias.at[:, :, 0].add(jnp.asarray(estimator.sink)[:, None])
    tokens = jnp.asarray(estimator.tokens)[None, :, None, None] * pooled.tokens
    return products.reshape(b, h, rows, grid.columns), bias[None], tokens


@partial(jax.jit, static_argnames="grid")
def block_mass(pooled: Pooled, estimator: Estimator, grid: CausalGrid) -> Float[Array, "B H rows n"]:
    """Estimated mass, the counterpart of `BlockStatistics.share`: a row sums to 1."""
    return jax.nn.softmax(block_logits(pooled, estimator, grid), -1)


def layer_mass(
    query: Float[Array, "B T H D"], key: Float[Array, "B T K D"], estimator: Estimator, grid: CausalGrid
) -> Float[Array, "B H rows n"]:
    """The masses that a layer's blocks are chosen by: estimated ones, exact ones in the last rows."""
    return with_exact_rows(block_mass(pool(query, key, grid), estimator, grid), query, key, Rows(grid))
