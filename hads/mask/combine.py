"""The union and the intersection of two masks, exact to the element.

Without bitmaps, an intersection needs only blocks and both rules, and a union of masks with the same rule only blocks
and that rule. Every other result is built from its elements, block by block.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from xsake.hads.mask.band import Band
from xsake.hads.mask.bitmaps import bit
from xsake.hads.mask.lists.mask_lists import MaskLists
from xsake.hads.mask.lists.rows import ArrayT, at, rows_of_slots
from xsake.hads.mask.token_function import Known, mask_of_tokens


def union(a: MaskLists, b: MaskLists, capacity: int | None) -> MaskLists:
    check(a, b)
    band = a.band | b.band
    return _combined(a, b, operator.or_, band, capacity, by_blocks=a.band == b.band)


def intersection(a: MaskLists, b: MaskLists, capacity: int | None) -> MaskLists:
    check(a, b)
    return _combined(a, b, operator.and_, a.band & b.band, capacity, by_blocks=True)


def check(a: MaskLists, b: Any) -> None:
    """Raise unless the masks have the same blocks and lengths, and their batches and heads broadcast."""
    if not isinstance(b, MaskLists):
        raise TypeError(f"a BlockMask combines with another BlockMask, got {type(b).__name__}")
    for name in ("block_q", "block_kv", "q_len", "kv_len"):
        if getattr(a, name) != getattr(b, name):
            raise ValueError(f"masks must have the same {name}; got {getattr(a, name)} and {getattr(b, name)}")
    for name in ("batch", "heads"):
        sizes = getattr(a, name), getattr(b, name)
        if 1 not in sizes and sizes[0] != sizes[1]:
            raise ValueError(f"masks must have the same {name}, or 1; got {sizes[0]} and {sizes[1]}")


def _combined(
    a: MaskLists, b: MaskLists, op: Callable, band: Band, capacity: int | None, *, by_blocks: bool
) -> MaskLists:
    incomplete = [heads for mask in (a, b) if (heads := mask.incomplete_heads()) is not None]
    grid = a.grid if a.grid == b.grid else a.grid.with_band(band)
    traced = a.traced or b.traced
    options: dict[str, Any] = dict(capacity=capacity, transpose=a.has_transpose and b.has_transpose)
    if by_blocks and a.bitmaps is None and b.bitmaps is None:
        allowed, full = grid.allowed_and_full()
        active = op(a.to_blocks(), b.to_blocks()) & allowed[None, None]
        mask = MaskLists.of_active(active, full, grid, **options, density_hint=None, traced=traced)
    else:
        xp: Any = jnp if traced else np
        one, other = _Elements(xp, a), _Elements(xp, b)
        known = Known(op(one.number >= 0, other.number >= 0), op(one.full, other.full))
        size = dict(batch=max(a.batch, b.batch), heads=max(a.heads, b.heads))
        mask = mask_of_tokens(grid, lambda *where: op(one(*where), other(*where)), **size, known=known, **options)
    for heads in incomplete:
        mask = mask.poisoned(heads)
    return mask


class _Elements:
    """Whether elements (b, h, q, k) of a mask attend. `number` is the bitmap of a listed block, -1 of any other."""

    def __init__(self, xp: Any, mask: MaskLists):
        self._mask = mask
        slots = np.arange(mask.capacity, dtype=np.int32)
        ptr, num_full = mask.read(mask.kv_row_ptr), mask.read(mask.kv_num_full)
        own = jnp if mask.traced else np
        row = own.minimum(rows_of_slots(own, ptr, mask.capacity), mask.num_q_blocks - 1)
        first, count = own.take_along_axis(ptr, row, -1), own.take_along_axis(num_full, row, -1)
        self.full = xp.asarray(mask.by_block(slots[None, None] - first < count, False))
        numbers = own.zeros_like(row) if mask.bitmaps is None else mask.read(mask.kv_bitmap)
        self.number = xp.asarray(mask.by_block(numbers, -1))
        self._bitmaps = None if mask.bitmaps is None else xp.asarray(mask.read(mask.bitmaps))

    def __call__(self, b: ArrayT, h: ArrayT, q: ArrayT, k: ArrayT) -> ArrayT:
        mask = self._mask
        number = at(self.number, b, h, q // mask.block_q, k // mask.block_kv)
        attends = (number >= 0) & mask.band.allows(k - q)
        if self._bitmaps is None:
            return attends
        row = q % mask.block_q
        return attends & bit(at(self._bitmaps, b, h, number, k % mask.block_kv, row // 32), row)
