"""Check that concrete lists are a mask, as every constructor makes them and every backend expects them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from xsake._ground import fields
from xsake._ground.kinds import FLAG, Kind, maybe, number, whole
from xsake._ground.read import check_names
from xsake.hads.mask.band import NO_LIMIT
from xsake.hads.mask.bitmaps import words_of
from xsake.hads.mask.grid import Grid
from xsake.hads.mask.lists.mask_lists import BITMAPS, COLUMNS, ROWS, STATIC, MaskLists
from xsake.hads.mask.lists.rows import at, rows_of_slots

_SLOTS_AT_ONCE = 1 << 21  # heads are checked a few at a time, in little memory
_WINDOW = Kind(
    lambda value: isinstance(value, list | tuple) and len(value) == 2 and all(map(maybe(whole(0)).allows, value)),
    "a pair of sides, each an int of at least 0 or None",
)
_STATIC = dict.fromkeys(("block_q", "block_kv", "q_len", "kv_len"), whole(1, NO_LIMIT)) | {
    "is_causal": FLAG,
    "local_window_size": maybe(_WINDOW),
    "density_hint": maybe(number(least=0)),
    "complete": FLAG,
}


def checked_static(values: Mapping[str, Any]) -> dict[str, Any]:
    """The static fields of a mask, as JSON stores them; ValueError unless all are there and each is allowed."""
    check_names(values, STATIC)
    for name, kind in _STATIC.items():
        fields.check(name, values[name], kind)
    window = values["local_window_size"]
    return {**values, "local_window_size": None if window is None else tuple(window)}


def check(mask: MaskLists) -> None:
    """Raise ValueError, naming the field, if no constructor could have made this mask of NumPy arrays.

    A mask that overflowed its capacity passes, unless `complete` denies it. In the heads that overflowed only ranges
    are checked: attention gives NaN there, whatever the lists hold.
    """
    grid = mask.grid
    grid.check_blocks()
    _check_arrays(mask, grid)
    if mask.complete and mask.overflowed().any():
        raise ValueError(f"complete=True, but kv_row_ptr counts more blocks than the {mask.capacity} slots of a head")
    heads = mask.batch * mask.heads
    step = max(1, _SLOTS_AT_ONCE // max(mask.capacity, grid.num_q, grid.num_kv))
    for start in range(0, heads, step):
        _check_heads(mask, grid, np.arange(start, min(start + step, heads)))


def _check_arrays(mask: MaskLists, grid: Grid) -> None:
    """Which arrays there are, their dtypes and their shapes."""
    _check_array("kv_indices", mask.kv_indices, np.int32, ("batch", "heads", "slots"))
    b, h, slots = mask.kv_indices.shape
    shapes: dict[str, tuple[int, ...]] = {}
    for (indices, ptr, full, order), rows in ((ROWS, grid.num_q), (COLUMNS, grid.num_kv)):
        shapes |= {indices: (b, h, slots), ptr: (b, h, rows + 1), full: (b, h, rows), order: (b, h, rows)}
    needed = {*ROWS, *(COLUMNS if mask.has_transpose else ())}
    if mask.bitmaps is not None:
        shapes |= {"kv_bitmap": (b, h, slots), "q_bitmap": (b, h, slots)}
        needed |= {"bitmaps", "kv_bitmap", *(("q_bitmap",) if mask.has_transpose else ())}
    for name in (*ROWS, *COLUMNS, *BITMAPS):
        if (getattr(mask, name) is not None) != (name in needed):
            raise ValueError(f"{name} is {'missing' if name in needed else 'there without the fields it goes with'}")
    for name in needed - {"bitmaps"}:
        _check_array(name, getattr(mask, name), np.int32, shapes[name])
    if mask.bitmaps is not None:
        _check_array("bitmaps", mask.bitmaps, np.uint32, ("batch", "heads", "bitmaps", "columns", "words"))
        shape = mask.bitmaps.shape
        allowed = ((1, b), (1, h), (shape[2],), (1, grid.block_kv), (words_of(grid.block_q),))
        if not all(size in sizes for size, sizes in zip(shape, allowed, strict=True)):
            raise ValueError(f"bitmaps must have one of the sizes {allowed} along each axis, not the shape {shape}")


def _check_array(name: str, array: Any, dtype: Any, shape: tuple[Any, ...]) -> None:
    """`shape` has numbers, or names of sizes that may be any but 0."""
    given = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
    fits = isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == len(shape)
    if not fits or not all(
        have > 0 if isinstance(want, str) else have == want for have, want in zip(array.shape, shape, strict=True)
    ):
        raise ValueError(f"{name} must be {np.dtype(dtype)}[{', '.join(map(str, shape))}], not {given}")


class _Listed(NamedTuple):
    """Listed blocks, an entry per block: its head, its place in the grid, whether it counts as full, and its bitmap."""

    head: np.ndarray
    row: np.ndarray
    column: np.ndarray
    full: np.ndarray
    bitmap: np.ndarray

    def in_order(self, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
        """(numbers of the blocks, rising; their bitmaps)."""
        block = (self.head * grid.num_q + self.row) * grid.num_kv + self.column
        order = np.argsort(block)
        return block[order], self.bitmap[order]


def _check_heads(mask: MaskLists, grid: Grid, heads: np.ndarray) -> None:
    """`heads` are numbers of heads, those of all batches in a row."""
    is_whole = ~np.asarray(mask.overflowed()).reshape(-1)[heads]
    by_row = _listed(mask, ROWS, "kv_bitmap", heads, is_whole, grid.num_kv)
    _check_listed(mask, grid, by_row, ROWS)
    block, bitmap = by_row.in_order(grid)
    if (block[1:] == block[:-1]).any():
        raise ValueError("kv_indices lists a block twice")
    if not mask.has_transpose:
        return
    by_column = _listed(mask, COLUMNS, "q_bitmap", heads, is_whole, grid.num_q)
    by_column = by_column._replace(row=by_column.column, column=by_column.row)
    _check_listed(mask, grid, by_column, COLUMNS)
    transposed_block, transposed_bitmap = by_column.in_order(grid)
    if not np.array_equal(block, transposed_block):
        raise ValueError("q_indices does not list the same blocks as kv_indices")
    if not np.array_equal(bitmap, transposed_bitmap):
        raise ValueError("q_bitmap does not give blocks the same bitmaps as kv_bitmap")


def _listed(
    mask: MaskLists, names: tuple[str, ...], bitmap: str, heads: np.ndarray, is_whole: np.ndarray, columns: int
) -> _Listed:
    """The blocks that are listed in the heads that lost none, after a check of the lists of all `heads`."""
    arrays = [getattr(mask, name) for name in names]
    indices, ptr, num_full, order = (array.reshape(-1, array.shape[-1])[heads] for array in arrays)
    of_row = np.diff(ptr.astype(np.int64))
    if ptr[:, 0].any() or (of_row < 0).any():
        raise ValueError(f"{names[1]} must begin at 0 and never fall")
    _check_range(names[2], num_full, of_row + 1)
    _check_range(names[0], indices, columns)
    if (np.sort(order) != np.arange(order.shape[-1])).any():
        raise ValueError(f"{names[3]} must name each row once")
    number = np.zeros_like(indices)
    if mask.bitmaps is not None:
        number = getattr(mask, bitmap).reshape(-1, mask.capacity)[heads]
        _check_range(bitmap, number, mask.bitmaps.shape[2])
    row = np.minimum(rows_of_slots(np, ptr, mask.capacity), num_full.shape[-1] - 1)
    slot = np.arange(mask.capacity)
    full = slot - np.take_along_axis(ptr, row, -1) < np.take_along_axis(num_full, row, -1)
    listed = (slot < ptr[:, -1:]) & is_whole[:, None]
    alike = listed[:, 1:] & (row[:, 1:] == row[:, :-1]) & (full[:, 1:] == full[:, :-1])
    if (alike & (indices[:, 1:] <= indices[:, :-1])).any():
        raise ValueError(f"{names[0]} must rise among the full blocks of a row, and among its other blocks")
    head = np.broadcast_to(heads[:, None], row.shape)
    place = [array[listed].astype(np.int64) for array in (head, row, indices)]
    return _Listed(place[0], place[1], place[2], full[listed], number[listed])


def _check_range(name: str, array: np.ndarray, end: Any) -> None:
    wrong = (array < 0) | (array >= end)
    if wrong.any():
        place = tuple(np.argwhere(wrong)[0])
        most = np.broadcast_to(end, array.shape)[place] - 1
        raise ValueError(f"{name} holds {array[place]}, where 0 to {most} can be")


def _check_listed(mask: MaskLists, grid: Grid, listed: _Listed, names: tuple[str, ...]) -> None:
    if not np.all(grid.is_allowed(np, listed.row, listed.column)):
        raise ValueError(f"{names[0]} lists blocks that is_causal or local_window_size excludes")
    full = grid.is_full(listed.row, listed.column)
    if mask.bitmaps is not None:
        ones = np.packbits(np.arange(32 * words_of(grid.block_q)) < grid.block_q, bitorder="little").view("<u4")
        has_all = ((mask.bitmaps & ones) == ones).all((-2, -1))
        full = full & at(has_all, listed.head // mask.heads, listed.head % mask.heads, listed.bitmap)
    if (listed.full & ~full).any():
        raise ValueError(f"{names[2]} counts blocks as full of which not every element attends")
