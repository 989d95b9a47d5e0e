"""The compressed rows of a mask, from boolean blocks: concrete ones here, traced ones by `compact`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

ArrayT = Any  # numpy outside jit, jax inside


def compress(xp: Any, active: ArrayT, full: ArrayT, capacity: int) -> tuple[ArrayT, ...]:
    """Rows of bool[b, h, R, C] as (indices, row_ptr, num_full, order): in a row full ones ascending, then partial."""
    if xp is np:
        return finished(xp, *_compress_concrete(active, full, capacity))
    from xsake.hads.mask.lists.compact import compact

    return finished(xp, *compact(active, full, capacity))


def finished(xp: Any, indices: ArrayT, row_ptr: ArrayT, num_full: ArrayT) -> tuple[ArrayT, ...]:
    """The lists as kernels need them: free slots repeat the last entry, and `order` ranks the rows, longest first."""
    capacity = indices.shape[-1]
    used = xp.minimum(row_ptr[..., -1:], capacity)
    last = xp.take_along_axis(indices, xp.maximum(used - 1, 0), -1)
    inside = np.arange(capacity)[None, None] < used
    indices = xp.where(inside, indices, xp.where(used > 0, last, 0)).astype(np.int32)
    order = xp.argsort(-xp.diff(row_ptr, axis=-1), axis=-1, stable=True).astype(np.int32)
    return indices, row_ptr, num_full, order


def _compress_concrete(active: np.ndarray, full: np.ndarray, capacity: int) -> tuple[np.ndarray, ...]:
    """(indices, row_ptr, num_full), the slots past the last entry 0."""
    b, h, num_rows, num_columns = active.shape
    num_full = (active & full).sum(-1, dtype=np.int32)
    ends = np.cumsum(active.sum(-1, dtype=np.int32), -1, dtype=np.int32)
    row_ptr = np.concatenate([np.zeros((b, h, 1), np.int32), ends], -1)

    rank_full = np.cumsum(active & full, -1, dtype=np.int32) - 1
    rank_partial = np.cumsum(active & ~full, -1, dtype=np.int32) - 1 + num_full[..., None]
    slot = row_ptr[..., :-1, None] + np.where(full, rank_full, rank_partial)
    slot = np.where(active, slot, capacity).reshape(b, h, -1)  # one spare slot swallows inactive blocks
    column = np.broadcast_to(np.tile(np.arange(num_columns, dtype=np.int32), num_rows), slot.shape)
    lead = np.ogrid[:b, :h]
    indices = np.zeros((b, h, capacity + 1), np.int32)
    indices[lead[0][..., None], lead[1][..., None], slot] = column
    return indices[..., :-1], row_ptr, num_full


def rows_of_slots(xp: Any, ptr: ArrayT, capacity: int) -> ArrayT:
    """The row of each slot of lists with these row_ptr: how many rows end at or before the slot."""
    lead = tuple(x[..., None] for x in np.ogrid[tuple(slice(size) for size in ptr.shape[:-1])])
    ends = (*lead, xp.minimum(ptr[..., 1:], capacity))
    count = xp.zeros((*ptr.shape[:-1], capacity + 1), np.int32)
    if xp is np:
        np.add.at(count, ends, 1)
    else:
        count = count.at[ends].add(1)
    return xp.cumsum(count, -1)[..., :capacity]


def by_block(xp: Any, num_columns: int, absent: Any, ptr: ArrayT, columns: ArrayT, of_slots: ArrayT) -> ArrayT:
    """[b, h, R, num_columns, ...]: `of_slots`, [b, h, N, ...], at the row and column of each slot; else `absent`."""
    b, h = (x[..., None] for x in np.ogrid[: columns.shape[0], : columns.shape[1]])
    row = rows_of_slots(xp, ptr, columns.shape[2])  # slots past the last entry land in a spare row
    shape = (*columns.shape[:2], ptr.shape[-1], num_columns, *of_slots.shape[3:])
    return put(xp, xp.full(shape, absent, of_slots.dtype), (b, h, row, columns), of_slots)[:, :, :-1]


def at(array: ArrayT, *where: ArrayT) -> ArrayT:
    """`array[where]`, a dimension of size 1 being shared."""
    return array[tuple(0 * i if size == 1 else i for i, size in zip(where, array.shape, strict=True))]


def put(xp: Any, array: ArrayT, where: tuple, value: Any) -> ArrayT:
    """The array with `array[where] = value`; a numpy array is changed in place."""
    if xp is jnp:
        return array.at[where].set(value)
    array[where] = value
    return array
