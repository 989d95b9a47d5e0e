"""The tokens' feature of a chunk's rows (`selection.chunk`) as a GPU kernel: no logit of a key reaches memory."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float, Int

from xsake.hads.mask.triton_call import TILE, iota, triton_call
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.triton_estimate import exp2, log2_from, rows_by_rows

_BLOCKS = 16  # of keys per program
_WARPS, _STAGES = 4, 2
_LOG2_E = math.log2(math.e)


def over_keys(
    query: Float[Array, "B H rows D"],
    key: Float[Array, "B S K D"],
    k_mean: Float[Array, "B K blocks D"],
    lengths: Int[Array, "B"],
    first: int,
    grid: CausalGrid,
) -> Float[Array, "B H rows n"]:
    """`chunk._over_keys`; entries above the diagonal hold anything."""
    b, h, rows, d = query.shape
    n, groups = grid.side, h // key.shape[2]
    tiles, parts = -(-rows // TILE), -(-n // _BLOCKS)
    narrow = key.dtype if key.dtype.itemsize == 2 else jnp.bfloat16
    mean = (jnp.pad(query, ((0, 0), (0, 0), (0, tiles * TILE - rows), (0, 0))) * _LOG2_E).astype(narrow)

    def kernel(q_ref: Any, key_ref: Any, mean_ref: Any, length_ref: Any, out_ref: Any) -> None:
        tile, part = lax.div(pl.program_id(0), parts), lax.rem(pl.program_id(0), parts)
        begin, length = part * _BLOCKS, jnp.minimum(length_ref[0], grid.length)
        end = jnp.minimum(jnp.minimum(begin + _BLOCKS, first + (tile + 1) * TILE), n)
        q = q_ref[...]

        def step(j: Array, about: Array) -> Array:
            token = j * grid.block + iota(grid.block)
            exists = token < length
            here = key_ref.at[pl.ds(j * grid.block, grid.block), :]
            k = plgpu.load(here, mask=jnp.broadcast_to(exists[:, None], (grid.block, d)), other=0.0)
            above = exp2(rows_by_rows(q, k.astype(q.dtype)) - about[:, None])
            above = jnp.where(exists[None, :], above, 0.0)
            size = jnp.clip(length - j * grid.block, 1, grid.block).astype(jnp.float32)
            out = log2_from(about, above.sum(1) / size)
            out_ref[j, :] = out * (1 / _LOG2_E)
            return out

        # Exponents are taken about the result of the block before: this saves a pass for the largest logit or the mean.
        about = (q.astype(jnp.float32) * mean_ref[begin, :].astype(jnp.float32)[None, :]).sum(1)
        lax.fori_loop(begin, end, step, about)

    (out,) = triton_call(
        kernel,
        "hads_chunk_tokens",
        (tiles * parts, h, b),
        [
            (mean, pl.BlockSpec((None, None, TILE, d), lambda i, h, b: (b, h, lax.div(i, parts), 0))),
            (key, pl.BlockSpec((None, n * grid.block, None, d), lambda i, h, b: (b, 0, lax.div(h, groups), 0))),
            (k_mean, pl.BlockSpec((None, None, k_mean.shape[2], d), lambda i, h, b: (b, lax.div(h, groups), 0, 0))),
            (lengths[:, None], pl.BlockSpec((None, 1), lambda i, h, b: (b, 0))),
        ],
        [
            (
                (b, h, tiles, n, TILE),
                jnp.float32,
                pl.BlockSpec((None, None, None, n, TILE), lambda i, h, b: (b, h, lax.div(i, parts), 0, 0)),
            )
        ],
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out.swapaxes(3, 4).reshape(b, h, tiles * TILE, n)[:, :, :rows]
