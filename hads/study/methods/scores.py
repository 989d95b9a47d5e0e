"""Block scores of the rivals that come with xsake, and the parts that such scores are made of.

Each score takes a layer's queries and keys and gives [B, H, rows, n]: -inf in logits and 0 in shares where causality
forbids.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from xsake.hads.calibration.block_statistics import scan_rows
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.estimator import KINDS
from xsake.hads.selection.pooled import KIND_OF_PART, Pooled, pool

Query = Float[Array, "B T H D"]
Key = Float[Array, "B T K D"]
Blocks = Float[Array, "B H rows n"]


def mean_logits(query: Query, key: Key, grid: CausalGrid) -> Blocks:
    """Product of mean query and mean key (MoBA, MInference's block-sparse heads)."""
    return causal_only(products(*pooled_parts(pool(query, key, grid), "mean")), grid)


def antidiagonal_shares(query: Query, key: Key, grid: CausalGrid, stride: int) -> Blocks:
    """Softmax of sums along antidiagonals of strides, added up in blocks (XAttention)."""
    _check_stride(stride, grid)
    parts = grid.rows * grid.block_q // stride
    q, k = (_strides(x, parts, stride) for x in (query, key))  # [B, parts, stride, heads, D]
    b, _, _, h, d = q.shape
    q = q[:, :, ::-1].reshape(b, parts, stride, k.shape[3], -1, d)
    # Made on the device: as a constant it would make the program megabytes large.
    causal = jnp.arange(parts)[:, None] >= jnp.arange(parts)[None]
    exists = np.arange(parts) * stride < grid.length
    logits = jnp.einsum("bisxgd,bjsxd->bxgij", q, k) * (d**-0.5 / stride)
    weights = jax.nn.softmax(jnp.where((causal & exists[None])[None, None, None], logits, -jnp.inf), -1)
    weights = jnp.where(exists[:, None], weights, 0)
    weights = weights.reshape(b, h, grid.rows, grid.block_q // stride, -1, grid.block // stride)
    blocks = weights.sum((3, 5))[..., : grid.columns]
    return blocks / blocks.sum(-1, keepdims=True)


def strided_peaks(query: Query, key: Key, grid: CausalGrid, stride: int = 16) -> Blocks:
    """Log of the largest share that any query gives a block, keys averaged over strides (FlashPrefill)."""
    _check_stride(stride, grid)
    slots = grid.columns * grid.block
    keys = jnp.pad(key.astype(jnp.float32), ((0, 0), (0, slots - grid.length), (0, 0), (0, 0)))
    exists = np.arange(slots).reshape(-1, stride) < grid.length
    sizes = np.maximum(exists.sum(-1), 1).astype(np.float32)
    keys = keys.reshape(key.shape[0], -1, stride, *key.shape[2:]).sum(2) / sizes[None, :, None, None]
    start = np.arange(len(sizes))[None] * stride

    def row(seen: int, i: Array, q: Array) -> Array:
        some = -(-seen // grid.block) * (grid.block // stride)  # strides of the blocks that the row sees
        logits = jnp.einsum("bkgtd,bskd->bkgts", q.astype(jnp.float32), keys[:, :some]) * q.shape[-1] ** -0.5
        t = i * grid.block_q + jnp.arange(grid.block_q)
        logits = jnp.where((t[:, None] >= start[:, :some]) & exists.any(-1)[None, :some], logits, -jnp.inf)
        weights = jax.nn.softmax(logits, -1).reshape(*logits.shape[:-1], -1, grid.block // stride).sum(-1)
        peaks = jnp.where((t < grid.length)[:, None], weights, 0).max(-2)
        return jnp.pad(peaks, [(0, 0)] * 3 + [(0, grid.columns - peaks.shape[-1])])

    return causal_only(jnp.log(row_by_row(row, query, key.shape[2], grid)), grid)


def pooled_parts(pooled: Pooled, kind: str) -> tuple[Array, Array]:
    """The parts of the pooled vectors that make one of `KINDS`: queries [B, K, G, n, x] and keys [B, K, n, x]."""
    of_kind = [part for part, number in enumerate(KIND_OF_PART) if KINDS[number] == kind]
    d = pooled.query.shape[-1] // len(KIND_OF_PART)
    inside = slice(of_kind[0] * d, (of_kind[-1] + 1) * d)
    b, h, n, _ = pooled.query.shape
    kv_heads = pooled.key.shape[1]
    return pooled.query[..., inside].reshape(b, kv_heads, h // kv_heads, n, -1), pooled.key[..., inside]


def products(q: Float[Array, "B K G n x"], k: Float[Array, "B K n x"], scale: Array | float = 1.0) -> Blocks:
    logits = jnp.einsum("bkgix,bkjx->bkgij", q, k) / scale
    return logits.reshape(q.shape[0], -1, q.shape[3], k.shape[2])


def causal_only(logits: Blocks, grid: CausalGrid) -> Blocks:
    return jnp.where(grid.causal(), logits, -jnp.inf)


def row_by_row(row: Callable[..., Array], query: Query, kv_heads: int, grid: CausalGrid) -> Blocks:
    """`row` of every row of blocks, [B, K, G, n] each, as [B, H, rows, n]."""
    rows = jnp.moveaxis(scan_rows(row, query, kv_heads, grid), 0, 3)
    return rows.reshape(query.shape[0], query.shape[2], grid.rows, grid.columns)


def _strides(x: Array, parts: int, stride: int) -> Array:
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, parts * stride - x.shape[1]), (0, 0), (0, 0)))
    return x.reshape(x.shape[0], parts, stride, *x.shape[2:])


def _check_stride(stride: int, grid: CausalGrid) -> None:
    if grid.block % stride:
        raise ValueError(f"{stride=} must divide the block of {grid.block}")
