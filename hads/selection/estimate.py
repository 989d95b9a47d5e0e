"""The attention between every pair of blocks, estimated from pooled vectors with a head's calibrated weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.estimator import Estimator, bucket_of
from xsake.hads.selection.exact import with_exact_rows
from xsake.hads.selection.pooled import Pooled, pool, spread_weights
from xsake.hads.selection.rows import Rows

_LOWEST = -1e30


def block_logits(pooled: Pooled, estimator: Estimator, rows: Rows) -> Float[Array, "B H rows n"]:
    """Unnormalised log mass, with next to nothing where a block is not allowed.

    That is finite: so are the masses of rows past a sequence's end, of which nothing is kept.
    """
    grid, (b, h, number, width) = rows.grid, pooled.query.shape
    kv_heads = pooled.key.shape[1]
    weighted = pooled.query * spread_weights(jnp.asarray(estimator.features))[None, :, None]
    # The default precision (TF32 on a GPU) is far finer than the error of the estimate.
    products = jnp.einsum("bkgid,bkjd->bkgij", weighted.reshape(b, kv_heads, -1, number, width), pooled.key)
    bias = jnp.asarray(estimator.distance)[:, bucket_of(grid.distance()[rows.first :])]
    sink = jnp.asarray(estimator.sink)
    if rows.packed is None:
        bias = bias.at[:, :, 0].add(sink[:, None])[None]
    else:
        bias = bias[None] + jnp.where(rows.column() == 0, sink[None, :, None, None], 0.0)
    tokens = jnp.asarray(estimator.tokens)[None, :, None, None] * pooled.tokens
    logits = products.reshape(b, h, number, grid.columns) + (bias + tokens)
    return jnp.where(rows.allowed(), logits, _LOWEST)


@partial(jax.jit, static_argnames="grid")
def block_mass(pooled: Pooled, estimator: Estimator, grid: CausalGrid) -> Float[Array, "B H rows n"]:
    """Estimated mass, the counterpart of `BlockStatistics.share`: a row sums to 1."""
    return jax.nn.softmax(block_logits(pooled, estimator, Rows(grid)), -1)


def layer_mass(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    estimator: Estimator,
    rows: Rows,
    known: Float[Array, "B K n five_D"] | None = None,
) -> Float[Array, "B H rows n"]:
    """The masses that a layer's blocks are chosen by: estimated ones, exact ones in the last rows.

    Queries are the tokens of `rows`; `known` are the key parts of the features, where they are known.
    """
    where: dict[str, Any] = dict(first=rows.first, lengths=rows.lengths, span=rows.span)
    pooled = pool(query, key, rows.grid, **where, known=known)
    mass = jax.nn.softmax(block_logits(pooled, estimator, rows), -1)
    return with_exact_rows(mass, query, key, rows)
