"""The weights of compressed attention, added up over the heads of a group, as a GPU kernel: none of a single head is
written to memory. Lowered by Pallas-Triton, as the kernels that make HADS's masks."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float

from xsake.hads.mask.lists.triton_call import iota, triton_call
from xsake.kernels_pallas_gpu.triton.tiles import dot

_QUERIES, _BLOCKS = 64, 64  # of a tile
_WARPS, _STAGES = 4, 2
_LOG2_E = math.log2(math.e)


def group_weights(
    query: Float[Array, "B T H D"],
    blocks: Float[Array, "B n K D"],
    lse: Float[Array, "B T H"],
    *,
    block_size: int,
    scale: float,
) -> Float[Array, "B K T n"]:
    """Sum over a group's heads of exp(scale * q.k - lse). Only entries of blocks that end at the query's token or
    before are right; others are 0 or not written."""
    b, t, h, d = query.shape
    n, k = blocks.shape[1:3]
    group, width = h // k, pl.next_power_of_2(d)
    columns = -(-n // _BLOCKS) * _BLOCKS
    if width != d:
        query, blocks = (jnp.pad(x, ((0, 0),) * 3 + ((0, width - d),)) for x in (query, blocks))
    query = query.reshape(b, t, k, group, width)
    statistic = (lse * jnp.float32(_LOG2_E)).swapaxes(1, 2).reshape(b, k, group, t)

    def kernel(q_ref: Any, k_ref: Any, statistic_ref: Any, out_ref: Any) -> None:
        first = pl.program_id(0) * _QUERIES
        token = first + iota(_QUERIES)
        exists = token < t

        def column(number: Array, _: None) -> None:
            at = number * _BLOCKS
            block = at + iota(_BLOCKS)
            keys = plgpu.load(
                k_ref.at[pl.ds(at, _BLOCKS), :],
                mask=jnp.broadcast_to((block < n)[:, None], (_BLOCKS, width)),
                other=0.0,
            )
            complete = ((block + 1) * block_size)[None, :] <= token[:, None] + 1

            def head(g: Array, total: Array) -> Array:
                queries = plgpu.load(
                    q_ref.at[pl.ds(first, _QUERIES), g, :],
                    mask=jnp.broadcast_to(exists[:, None], (_QUERIES, width)),
                    other=0.0,
                )
                own = plgpu.load(statistic_ref.at[g, pl.ds(first, _QUERIES)], mask=exists, other=0.0)
                logits = dot(queries, keys, (1, 1))
                p = jnp.exp2(logits * jnp.float32(scale * _LOG2_E) - own[:, None])
                return total + jnp.where(complete, p, 0.0)

            weights = lax.fori_loop(0, group, head, jnp.zeros((_QUERIES, _BLOCKS), jnp.float32))
            plgpu.store(
                out_ref.at[pl.ds(first, _QUERIES), pl.ds(at, _BLOCKS)],
                weights,
                mask=jnp.broadcast_to(exists[:, None], (_QUERIES, _BLOCKS)),
            )

        last = jnp.minimum(first + _QUERIES, t)
        lax.fori_loop(0, lax.div(lax.div(last, block_size) + _BLOCKS - 1, _BLOCKS), column, None)

    (out,) = triton_call(
        kernel,
        "xsake_group_weights",
        (-(-t // _QUERIES), k, b),
        [
            (query, pl.BlockSpec((None, t, None, group, width), lambda i, k, b: (b, 0, k, 0, 0))),
            (blocks, pl.BlockSpec((None, n, None, width), lambda i, k, b: (b, 0, k, 0))),
            (statistic, pl.BlockSpec((None, None, group, t), lambda i, k, b: (b, k, 0, 0))),
        ],
        [((b, k, t, columns), jnp.float32, pl.BlockSpec((None, None, t, columns), lambda i, k, b: (b, k, 0, 0)))],
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out[..., :n]
