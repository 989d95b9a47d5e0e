"""Block scores of published methods, in our own words and at our block size.

Each takes a layer's queries and keys and gives [B, H, n, n]; what causality forbids is -inf in logits and 0 in shares.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from xsake.hads.calibration.block_statistics import block_sums, scan_rows
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.pooled import Pooled, over_keys, pool

Query = Float[Array, "B T H D"]
Key = Float[Array, "B T K D"]
Blocks = Float[Array, "B H n n"]


def mean_logits(query: Query, key: Key, grid: CausalGrid) -> Blocks:
    """Product of mean query and mean key (MoBA, MInference's block-sparse heads)."""
    pooled = pool(query, key, grid)
    return _causal(_product(*_parts(pooled, slice(0, 1))), grid)


def bound_logits(query: Query, key: Key, grid: CausalGrid) -> Blocks:
    """The largest logit that the mean query could have with the block's keys, from their extremes (Quest)."""
    return _causal(_product(*_parts(pool(query, key, grid), slice(3, 5))), grid)


def second_order_logits(query: Query, key: Key, grid: CausalGrid) -> Blocks:
    """Mean plus half the variance of the mean query's logits over a block's keys: their whole covariance (COBS)."""
    q, k = _parts(pool(query, key, grid), slice(0, 1))  # [B, K, G, n, D], scaled, and [B, K, n, D]
    q = q.reshape(q.shape[0], -1, *q.shape[3:])
    return _causal(over_keys(q, key, k, grid, jnp.square, lambda mean, variance: mean + 0.5 * variance), grid)


def antidiagonal_shares(query: Query, key: Key, grid: CausalGrid, stride: int) -> Blocks:
    """Softmax of sums along antidiagonals of strides, added up in blocks (XAttention)."""
    if grid.block % stride:
        raise ValueError(f"{stride=} must divide the block of {grid.block}")
    parts = grid.side * grid.block // stride
    q, k = (_strides(x, parts, stride) for x in (query, key))  # [B, parts, stride, heads, D]
    b, _, _, h, d = q.shape
    q = q[:, :, ::-1].reshape(b, parts, stride, k.shape[3], -1, d)
    causal = np.arange(parts)[:, None] >= np.arange(parts)
    exists = np.arange(parts) * stride < grid.length
    logits = jnp.einsum("bisxgd,bjsxd->bxgij", q, k) * (d**-0.5 / stride)
    weights = jax.nn.softmax(jnp.where(causal & exists, logits, -jnp.inf), -1)
    weights = jnp.where(exists[:, None], weights, 0)
    each = grid.block // stride
    blocks = weights.reshape(b, h, grid.side, each, grid.side, each).sum((3, 5))
    return blocks / blocks.sum(-1, keepdims=True)


def band_shares(query: Query, key: Key, grid: CausalGrid) -> tuple[Blocks, Blocks]:
    """Softmax of mean logits in two bands of rotary frequencies, each with the temperature that gives the band back the
    energy that pooling took (Prism): the upper half of the frequencies, and the lower three quarters."""
    pooled = pool(query, key, grid)
    q, k = _parts(pooled, slice(0, 1))
    half = q.shape[-1] // 2
    q = q * (2 * half) ** 0.5  # as it was before scaling
    bands = []
    for pairs in (np.arange(half) < half // 2, np.arange(half) >= half // 4):
        inside = np.concatenate([pairs, pairs])
        size = int(inside.sum())
        ratio = _rms(q[..., inside]) / _rms(q) * (_rms(k[..., inside]) / _rms(k))[:, :, None]
        temperature = (size / (2 * half)) ** 0.5 * ratio
        logits = _product(q[..., inside], k[..., inside], (size**0.5 * temperature)[..., None, None])
        bands.append(jax.nn.softmax(_causal(logits, grid), -1))
    return bands[0], bands[1]


def strided_peaks(query: Query, key: Key, grid: CausalGrid, stride: int = 16) -> Blocks:
    """Log of the largest share that any query gives a block, keys averaged over strides (FlashPrefill)."""
    tail = grid.side * grid.block - grid.length
    keys = jnp.pad(key.astype(jnp.float32), ((0, 0), (0, tail), (0, 0), (0, 0)))
    exists = np.arange(grid.side * grid.block).reshape(-1, stride) < grid.length
    sizes = np.maximum(exists.sum(-1), 1).astype(np.float32)
    keys = keys.reshape(key.shape[0], -1, stride, *key.shape[2:]).sum(2) / sizes[:, None, None]
    start = np.arange(len(sizes)) * stride

    def row(i: Array, q: Array) -> Array:
        logits = jnp.einsum("bkgtd,bskd->bkgts", q.astype(jnp.float32), keys) * q.shape[-1] ** -0.5
        t = i * grid.block + jnp.arange(grid.block)
        logits = jnp.where((t[:, None] >= start) & exists.any(-1), logits, -jnp.inf)
        weights = jax.nn.softmax(logits, -1).reshape(*logits.shape[:-1], grid.side, -1).sum(-1)
        return jnp.where((t < grid.length)[:, None], weights, 0).max(-2)

    return _causal(jnp.log(_rows(row, query, key.shape[2], grid)), grid)


def running_max_gap(query: Query, key: Key, grid: CausalGrid) -> Blocks:
    """How far a block's largest logit comes up to the largest so far of its row, at best among its queries: what
    decides in a kernel that goes from block to block (BLASST). Needs all logits."""

    def row(i: Array, q: Array) -> Array:
        logits = jnp.einsum("bkgtd,bskd->bkgts", q.astype(jnp.float32), key.astype(jnp.float32)) * q.shape[-1] ** -0.5
        t = i * grid.block + jnp.arange(grid.block)
        logits = jnp.where((t[:, None] >= jnp.arange(grid.length)) & (t < grid.length)[:, None], logits, -jnp.inf)
        tail = grid.side * grid.block - grid.length
        logits = jnp.pad(logits, [(0, 0)] * 4 + [(0, tail)], constant_values=-jnp.inf)
        peak = logits.reshape(*logits.shape[:-1], grid.side, grid.block).max(-1)
        gap = jnp.where(jnp.isfinite(peak), peak - jax.lax.cummax(peak, axis=peak.ndim - 1), -jnp.inf)
        return gap.max(-2)

    return _causal(_rows(row, query, key.shape[2], grid), grid)


def last_rows(query: Query, key: Key, grid: CausalGrid, queries: int = 64) -> tuple[Array, Array]:
    """What the last queries attend to: the shares of block columns and of block distances, [B, H, n] each (MInference's
    vertical-slash, FlexPrefill)."""
    queries = min(queries, grid.length)
    b, t, h, d = query.shape
    q = query[:, t - queries :].reshape(b, queries, key.shape[2], -1, d).astype(jnp.float32)
    logits = jnp.einsum("btkgd,bskd->bkgts", q, key.astype(jnp.float32)) * d**-0.5
    at = np.arange(t - queries, t)
    weights = jax.nn.softmax(jnp.where(at[:, None] >= np.arange(t), logits, -jnp.inf), -1)
    columns = block_sums(weights, grid).mean(-2).reshape(b, h, grid.side)
    back = at[:, None] - np.arange(t)  # the key so many tokens back
    by_distance = jnp.take_along_axis(weights, np.maximum(back, 0)[None, None, None], -1)
    by_distance = jnp.where(back >= 0, by_distance, 0)
    # Distances are rounded to whole blocks: a block's diagonal is nearest to its middle.
    half = CausalGrid(t + grid.block // 2, grid.block)
    slashes = block_sums(jnp.pad(by_distance, [(0, 0)] * 4 + [(grid.block // 2, 0)]), half).mean(-2)
    slashes = slashes.reshape(b, h, half.side)
    return columns, slashes[..., : grid.side].at[..., -1].add(slashes[..., grid.side :].sum(-1))


def self_similarity(x: Float[Array, "B T heads D"], grid: CausalGrid) -> Float[Array, "B heads n"]:
    """Mean cosine between the tokens of a block (SpargeAttention)."""
    x = x.astype(jnp.float32)
    unit = x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6)
    tail = grid.side * grid.block - grid.length
    sums = jnp.pad(unit, ((0, 0), (0, tail), (0, 0), (0, 0)))
    sums = sums.reshape(x.shape[0], grid.side, grid.block, *x.shape[2:]).sum(2)
    return jnp.moveaxis(jnp.square(sums).sum(-1), 1, 2) / jnp.asarray(grid.sizes, jnp.float32) ** 2


def _parts(pooled: Pooled, which: slice) -> tuple[Array, Array]:
    """Some of the five parts of the pooled vectors: queries [B, K, G, n, x] and keys [B, K, n, x]."""
    d = pooled.query.shape[-1] // 5
    inside = slice(which.start * d, which.stop * d)
    b, h, n, _ = pooled.query.shape
    kv_heads = pooled.key.shape[1]
    return pooled.query[..., inside].reshape(b, kv_heads, h // kv_heads, n, -1), pooled.key[..., inside]


def _product(q: Float[Array, "B K G n x"], k: Float[Array, "B K n x"], scale: Array | float = 1.0) -> Blocks:
    logits = jnp.einsum("bkgix,bkjx->bkgij", q, k) / scale
    return logits.reshape(q.shape[0], -1, q.shape[3], k.shape[2])


def _causal(logits: Blocks, grid: CausalGrid) -> Blocks:
    return jnp.where(grid.causal(), logits, -jnp.inf)


def _rms(x: Array) -> Array:
    return jnp.sqrt(jnp.square(x).mean((-2, -1)))


def _strides(x: Array, parts: int, stride: int) -> Array:
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, parts * stride - x.shape[1]), (0, 0), (0, 0)))
    return x.reshape(x.shape[0], parts, stride, *x.shape[2:])


def _rows(row: Callable[..., Array], query: Query, kv_heads: int, grid: CausalGrid) -> Blocks:
    """`row` of every row of blocks, [B, K, G, n] each, as [B, H, n, n]."""
    rows = jnp.moveaxis(scan_rows(row, query, kv_heads, grid), 0, 3)
    return rows.reshape(query.shape[0], query.shape[2], grid.side, grid.side)
