"""Block scores of the rivals that do not come with xsake, written from their papers' formulas.

Each score takes a layer's queries and keys and gives [B, H, n, n]: -inf in logits and 0 in shares where causality
forbids.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.exact import block_sums
from xsake.hads.selection.pooled import over_keys, pool
from xsake.hads.study.methods.scores import (
    Blocks,
    Key,
    Query,
    causal_only,
    mean_logits,
    pooled_parts,
    products,
    row_by_row,
)


def mean_shares(query: Query, key: Key, grid: CausalGrid) -> Blocks:
    """The mean-pooled map: the row softmax of `mean_logits`."""
    return jax.nn.softmax(mean_logits(query, key, grid), -1)


def bound_logits(query: Query, key: Key, grid: CausalGrid) -> Blocks:
    """The largest logit that the mean query could have with the block's keys, from their extremes (Quest)."""
    return causal_only(products(*pooled_parts(pool(query, key, grid), "bound")), grid)


def second_order_logits(query: Query, key: Key, grid: CausalGrid) -> Blocks:
    """Mean plus half the variance of the mean query's logits over a block's keys: their whole covariance (COBS)."""
    q, k = pooled_parts(pool(query, key, grid), "mean")  # [B, K, G, n, D], scaled, and [B, K, n, D]
    q = q.reshape(q.shape[0], -1, *q.shape[3:])
    return causal_only(over_keys(q, key, k, grid, jnp.square, lambda mean, variance: mean + 0.5 * variance), grid)


def band_shares(query: Query, key: Key, grid: CausalGrid) -> tuple[Blocks, Blocks]:
    """Softmax of mean logits in two bands of rotary frequencies, each with the temperature that gives the band back the
    energy that pooling took (Prism): the upper half of the frequencies, and the lower three quarters."""
    q, k = pooled_parts(pool(query, key, grid), "mean")
    half = q.shape[-1] // 2
    q = q * (2 * half) ** 0.5  # as it was before scaling
    bands = []
    for pairs in (np.arange(half) < half // 2, np.arange(half) >= half // 4):
        inside = np.concatenate([pairs, pairs])
        size = int(inside.sum())
        ratio = _rms(q[..., inside]) / _rms(q) * (_rms(k[..., inside]) / _rms(k))[:, :, None]
        temperature = (size / (2 * half)) ** 0.5 * ratio
        logits = products(q[..., inside], k[..., inside], (size**0.5 * temperature)[..., None, None])
        bands.append(jax.nn.softmax(causal_only(logits, grid), -1))
    return bands[0], bands[1]


def running_max_gap(query: Query, key: Key, grid: CausalGrid) -> Blocks:
    """A query's largest logit in a block minus its largest logit up to that block, then the largest difference among
    the block's queries: a kernel that goes from block to block decides by it (BLASST). Needs all logits."""

    def row(keys: int, i: Array, q: Array) -> Array:
        wide = key[:, :keys].astype(jnp.float32)
        logits = jnp.einsum("bkgtd,bskd->bkgts", q.astype(jnp.float32), wide) * q.shape[-1] ** -0.5
        t = i * grid.block_q + jnp.arange(grid.block_q)
        logits = jnp.where((t[:, None] >= jnp.arange(keys)) & (t < grid.length)[:, None], logits, -jnp.inf)
        blocks = -(-keys // grid.block)
        logits = jnp.pad(logits, [(0, 0)] * 4 + [(0, blocks * grid.block - keys)], constant_values=-jnp.inf)
        peak = logits.reshape(*logits.shape[:-1], blocks, grid.block).max(-1)
        gap = jnp.where(jnp.isfinite(peak), peak - jax.lax.cummax(peak, axis=peak.ndim - 1), -jnp.inf).max(-2)
        return jnp.pad(gap, [(0, 0)] * 3 + [(0, grid.columns - blocks)], constant_values=-jnp.inf)

    return causal_only(row_by_row(row, query, key.shape[2], grid), grid)


def last_rows(query: Query, key: Key, grid: CausalGrid, queries: int = 64) -> tuple[Array, Array]:
    """What the last queries attend to: the shares of block columns and of block distances, [B, H, n] each (MInference's
    vertical-slash, FlexPrefill)."""
    queries = min(queries, grid.length)
    b, t, h, d = query.shape
    q = query[:, t - queries :].reshape(b, queries, key.shape[2], -1, d).astype(jnp.float32)
    logits = jnp.einsum("btkgd,bskd->bkgts", q, key.astype(jnp.float32)) * d**-0.5
    at = np.arange(t - queries, t)
    weights = jax.nn.softmax(jnp.where(at[:, None] >= np.arange(t), logits, -jnp.inf), -1)
    columns = block_sums(weights, grid).mean(-2).reshape(b, h, grid.columns)
    back = at[:, None] - np.arange(t)  # the key at each distance: 0, 1, 2, ... tokens back
    by_distance = jnp.take_along_axis(weights, np.maximum(back, 0)[None, None, None], -1)
    by_distance = jnp.where(back >= 0, by_distance, 0)
    # Distances are rounded to whole blocks: a block's diagonal is nearest to its middle.
    half = CausalGrid(t + grid.block // 2, grid.block)
    slashes = block_sums(jnp.pad(by_distance, [(0, 0)] * 4 + [(grid.block // 2, 0)]), half).mean(-2)
    slashes = slashes.reshape(b, h, half.columns)
    return columns, slashes[..., : grid.columns].at[..., -1].add(slashes[..., grid.columns :].sum(-1))


def self_similarity(x: Float[Array, "B T heads D"], grid: CausalGrid) -> Float[Array, "B heads n"]:
    """Mean cosine between the tokens of a block (SpargeAttention)."""
    x = x.astype(jnp.float32)
    unit = x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6)
    tail = grid.columns * grid.block - grid.length
    sums = jnp.pad(unit, ((0, 0), (0, tail), (0, 0), (0, 0)))
    sums = sums.reshape(x.shape[0], grid.columns, grid.block, *x.shape[2:]).sum(2)
    return jnp.moveaxis(jnp.square(sums).sum(-1), 1, 2) / jnp.asarray(grid.sizes, jnp.float32) ** 2


def _rms(x: Array) -> Array:
    return jnp.sqrt(jnp.square(x).mean((-2, -1)))
