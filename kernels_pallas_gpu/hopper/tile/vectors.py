"""Vectors along the rows or the columns of a tile, and the tile of a bias, in the layout of wgmma's accumulators.

Tiles are [rows, columns]. Queries are rows in the forward and in dQ, columns in dK/dV and in the fused backward.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS

WGMMA = plgpu.Layout.WGMMA
ALONG_ROWS, ALONG_COLS = WGMMA.reduce(1), WGMMA.reduce(0)  # a number per row, and a number per column


def per_row(x: Array, shape: Sequence[int]) -> Array:
    return lax.broadcast_in_dim(x, tuple(shape), [0])


def per_col(x: Array, shape: Sequence[int]) -> Array:
    return lax.broadcast_in_dim(x, tuple(shape), [1])


def load_rows(refs: dict[str, Any], batch: Any, rows: Any) -> dict[str, Array]:
    """Load one number per resident token from global memory."""
    return {name: plgpu.load(r.at[batch, rows], layout=ALONG_ROWS, optimized=False) for name, r in refs.items()}


def over_columns(ref: Any) -> Array:
    """A number per streamed token, from shared memory, broadcast to a tile that has these tokens as columns."""
    return per_col(plgpu.load(ref, layout=ALONG_COLS), (ROWS, *ref.shape))


def keys_of_runs(starts: Sequence[Any], columns: int) -> Array:
    """The keys of a tile's columns, which are runs of equal length that begin at `starts`."""
    column = plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=ALONG_COLS)
    key, run = column + starts[0], columns // len(starts)
    for i, start in enumerate(starts[1:], 1):
        key = jnp.where(column < i * run, key, column + (start - i * run))
    return key


def int_vectors(count: int, ring: tuple[int, ...], tile: int) -> Any:
    """One buffer for all vectors of streamed tiles: separate buffers would each begin at a multiple of 1024 bytes."""
    return plgpu.SMEM((count, *ring, tile), jnp.int32) if count else None


def bias_tile(ref: Any, b: Any, h: Any, row: Any, col: Any, shape: tuple[int, int]) -> Array:
    """float32 tile of a bias ref [B | 1, H | 1, rows | 1, columns | 1], whose first element is at (row, col)."""
    lead = (0 if ref.shape[0] == 1 else b, 0 if ref.shape[1] == 1 else h)
    rows, cols = pl.ds(row, shape[0]), pl.ds(col, shape[1])
    if ref.shape[2] == 1 and ref.shape[3] == 1:
        return lax.broadcast_in_dim(ref[(*lead, 0, 0)].astype(jnp.float32), shape, [])
    if ref.shape[2] == 1:
        x = plgpu.load(ref.at[(*lead, 0, cols)], layout=ALONG_COLS, optimized=False)
        return per_col(x.astype(jnp.float32), shape)
    if ref.shape[3] == 1:
        x = plgpu.load(ref.at[(*lead, rows, 0)], layout=ALONG_ROWS, optimized=False)
        return per_row(x.astype(jnp.float32), shape)
    return plgpu.load(ref.at[(*lead, rows, cols)], layout=WGMMA, optimized=False).astype(jnp.float32)
