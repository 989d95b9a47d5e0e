"""Which query tile comes when: the longest of all batch entries and heads first, in one kernel where XLA would sort.

A call with few tiles per worker takes as long as its slowest worker. Lowered by Pallas-Triton.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Int

from xsake.hads.mask.triton_call import iota, triton_call

_OWN, _OTHERS, _WARPS = 16, 1024, 4  # tiles that a program places, and tiles that it compares them with at a time


def longest_first(
    row_ptr: Int[Array, "b h rows_and_one"], *, batch: int, heads: int
) -> tuple[Int[Array, "tiles_and_one"], Int[Array, "1"]]:
    """(the tiles' numbers by the length of their lists, the longest first; a zero to count from).

    Tile (batch entry * heads + head) * rows + row is number `row` of the lists of that head; lists are those of one
    head or batch entry, or of several. The last number is unused.
    """
    list_batch, list_heads, rows = row_ptr.shape[0], row_ptr.shape[1], row_ptr.shape[2] - 1
    tiles = batch * heads * rows

    def kernel(row_ptr_ref: Any, order_ref: Any, zero_ref: Any) -> None:
        def length_of(tile: Array) -> Array:
            of_head, row = lax.div(tile, jnp.int32(rows)), lax.rem(tile, jnp.int32(rows))
            entry, head = lax.div(of_head, jnp.int32(heads)), lax.rem(of_head, jnp.int32(heads))
            lists = (entry if list_batch > 1 else 0) * list_heads + lax.div(head * list_heads, jnp.int32(heads))
            at, exists = lists * (rows + 1) + row, tile < tiles
            begin, end = (plgpu.load(row_ptr_ref.at[at + i], mask=exists, other=0) for i in range(2))
            return jnp.where(exists, end - begin, -1)

        own = pl.program_id(0) * _OWN + iota(_OWN)
        length = length_of(own)[:, None]

        def count(number: Array, rank: Array) -> Array:
            other = number * _OTHERS + iota(_OTHERS)
            compared = length_of(other)[None, :]
            earlier = (compared > length) | ((compared == length) & (other[None, :] < own[:, None]))
            return rank + earlier.astype(jnp.int32).sum(1)

        rank = lax.fori_loop(0, -(-tiles // _OTHERS), count, jnp.zeros(_OWN, jnp.int32))
        exists = own < tiles
        plgpu.store(order_ref.at[jnp.where(exists, rank, tiles)], own, mask=exists)

        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            zero_ref[0] = jnp.int32(0)

    size = row_ptr.size
    order, zero = triton_call(
        kernel,
        "xsake_item_order",
        (-(-tiles // _OWN),),
        [(row_ptr.reshape(size), pl.BlockSpec((size,), lambda i: (0,)))],
        [
            ((tiles + 1,), jnp.int32, pl.BlockSpec((tiles + 1,), lambda i: (0,))),
            ((1,), jnp.int32, pl.BlockSpec((1,), lambda i: (0,))),
        ],
        num_warps=_WARPS,
    )
    return order, zero
