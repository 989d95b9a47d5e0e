"""Give a mask its bitmaps: a shared table of distinct ones, or, under jit, one for each slot of the lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from xsake.hads.mask.lists.mask_lists import MaskLists
from xsake.hads.mask.lists.rows import ArrayT, rows_of_slots


def with_bitmaps(mask: MaskLists, bitmaps: ArrayT, number: ArrayT) -> MaskLists:
    """The mask with `bitmaps`; number[b | 1, h | 1, nQ, nK] says which of them each block has."""
    xp: Any = jnp if mask.traced else np
    number = xp.broadcast_to(number, (mask.batch, mask.heads, *number.shape[2:]))
    b, h = _lead(mask)

    def of_slots(indices: ArrayT, ptr: ArrayT, number: ArrayT) -> ArrayT:
        return number[b, h, _rows(xp, ptr, mask.capacity), indices].astype(np.int32)

    transposed = None
    if mask.has_transpose:
        transposed = of_slots(mask.q_indices, mask.q_row_ptr, number.swapaxes(-1, -2))
    by_row = of_slots(mask.kv_indices, mask.kv_row_ptr, number)
    return dataclasses.replace(mask, bitmaps=bitmaps, kv_bitmap=by_row, q_bitmap=transposed)


def with_bitmap_per_slot(mask: MaskLists, bitmaps_of: Callable[[ArrayT, ArrayT], ArrayT]) -> MaskLists:
    """A traced mask with bitmaps of its own for each slot: bitmaps_of(row, column), both i32[b, h, N], gives them."""
    row = _rows(jnp, mask.kv_row_ptr, mask.capacity)
    slot = jnp.broadcast_to(jnp.arange(mask.capacity, dtype=jnp.int32), row.shape)
    # Free slots repeat the last entry: the smallest slot of a block is the one that counts.
    number = jnp.full((mask.batch, mask.heads, mask.num_q_blocks, mask.num_kv_blocks), mask.capacity - 1, jnp.int32)
    number = number.at[(*_lead(mask), row, mask.kv_indices)].min(slot)
    return with_bitmaps(mask, bitmaps_of(row, mask.kv_indices), number)


def with_bitmap_per_block(mask: MaskLists, bitmaps: ArrayT) -> MaskLists:
    """A traced mask with a bitmap of its own for every block, listed or not, row after row: bitmaps[b, h, nQ * nK]."""

    def numbers(indices: ArrayT, ptr: ArrayT, of: Callable[[ArrayT, ArrayT], ArrayT]) -> ArrayT:
        return of(_rows(jnp, ptr, mask.capacity), indices).astype(jnp.int32)

    width, transposed = mask.num_kv_blocks, None
    if mask.has_transpose:
        transposed = numbers(mask.q_indices, mask.q_row_ptr, lambda column, row: row * width + column)
    by_row = numbers(mask.kv_indices, mask.kv_row_ptr, lambda row, column: row * width + column)
    return dataclasses.replace(mask, bitmaps=bitmaps, kv_bitmap=by_row, q_bitmap=transposed)


def _rows(xp: Any, ptr: ArrayT, capacity: int) -> ArrayT:
    """The row of each slot; free slots take the last row."""
    return xp.minimum(rows_of_slots(xp, ptr, capacity), ptr.shape[-1] - 2)


def _lead(mask: MaskLists) -> tuple[np.ndarray, np.ndarray]:
    b, h = np.ogrid[: mask.batch, : mask.heads]
    return b[..., None], h[..., None]
