"""The order in which a forward's workers take the rows of several heads: longest first, very long rows in parts.

A chunk of a prompt has few rows, and the rows of a head that looks broadly are much longer than others. Each worker
takes about three rows, and all would wait for the worker with the longest. `lists.merge.merged_rows` merges the parts.
Pallas-Triton lowers this to one kernel; XLA would sort in several.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Int

from xsake.hads.mask.lists.triton_call import iota, triton_call, whole

MOST_PARTS = 4  # per row
LEAST_BLOCKS = 16  # per part: a part of fewer blocks would not pay for the merge
MOST_ITEMS = (1 << 15) - 1  # two counts of items are packed into 32 bits
_ROWS, _OTHERS = 8, 1024  # a program ranks 8 rows, and compares them with at most 1024 rows at a time
_WARPS = 8
_HIGH = MOST_ITEMS + 1


class WorkOrder(NamedTuple):
    """A section is several heads. Its rows are numbered head * n + row, the head counted in the section.

    items[section, :count] = row * MOST_PARTS + part, in the order of the work; other slots hold anything.

    parts_of[section, row] = (number of the row's first part) * MOST_PARTS + (parts of the row - 1). Only the parts of
    cut rows are numbered, one row after another. The last slot holds anything.
    """

    items: Int[Array, "sections slots"]
    count: Int[Array, "1"]
    parts_of: Int[Array, "sections rows_and_one"]


def room_for_parts(workers: int) -> int:
    """The most parts of cut rows: a cut row is longer than a worker's share, so each part is longer than half of it."""
    return 2 * workers


def work_order(row_ptr: Int[Array, "b h pointers"], *, section: int, workers: int, cut: bool) -> WorkOrder:
    """Orders `section` heads at a time. `cut`: cut rows that are longer than a worker's share; needs one section."""
    n = row_ptr.shape[2] - 1
    pointers = row_ptr.reshape(-1, section, n + 1)
    sections, rows = pointers.shape[0], section * n
    if cut and sections > 1:
        raise ValueError(f"{sections} sections: rows are cut where one section has all heads")
    slots, at_once = rows + cut * workers, min(_OTHERS, pl.next_power_of_2(rows))
    if rows + workers > MOST_ITEMS:
        raise ValueError(f"{rows} rows for {workers} workers: together they must be at most {MOST_ITEMS}")

    def kernel(pointer_ref: Any, items_ref: Any, count_ref: Any, parts_ref: Any) -> None:
        def length_of(row: Array) -> Array:
            head, place = lax.div(row, jnp.int32(n)), lax.rem(row, jnp.int32(n))
            begin, end = (plgpu.load(pointer_ref.at[head, place + i], mask=row < rows, other=0) for i in (0, 1))
            return end - begin

        def others(step: Any) -> Array:
            return step * at_once + iota(at_once)

        def over_others(add: Any, zero: Any) -> Any:
            return lax.fori_loop(jnp.int32(0), jnp.int32(pl.cdiv(rows, at_once)), add, zero)

        if cut:
            total = over_others(lambda step, so_far: so_far + _sum(length_of(others(step))), jnp.int32(0))
            share = lax.max(lax.div(total + (workers - 1), jnp.int32(workers)), jnp.int32(LEAST_BLOCKS))

        def parts_and_longest(row: Array) -> tuple[Array, Array]:
            """(parts of a row, blocks of its longest part); a row that does not exist has 0 parts."""
            length, exists = length_of(row), row < rows
            if not cut:
                return exists.astype(jnp.int32), length
            parts = jnp.clip(lax.div(length + (share - 1), jnp.broadcast_to(share, length.shape)), 1, MOST_PARTS)
            return jnp.where(exists, parts, 0), lax.div(length + (parts - 1), parts)

        row = pl.program_id(0) * _ROWS + iota(_ROWS)
        exists = row < rows
        parts, longest = parts_and_longest(row)

        def add(step: Any, carry: Any) -> Any:
            """Adds up the parts of longer rows, and in the high bits (times _HIGH) the parts of those that are cut."""
            before, count = carry
            other = others(step)
            their_parts, their_longest = parts_and_longest(other)
            both = their_parts + jnp.where(their_parts > 1, their_parts * _HIGH, 0)
            earlier = (their_longest[None] > longest[:, None]) | (
                (their_longest[None] == longest[:, None]) & (other[None] < row[:, None])
            )
            return before + _sum(jnp.where(earlier, both[None], 0), 1), count + _sum(their_parts)

        before, count = over_others(add, (jnp.zeros(_ROWS, jnp.int32), jnp.int32(0)))
        place, slot = lax.rem(before, jnp.int32(_HIGH)), lax.div(before, jnp.int32(_HIGH))
        for part in range(MOST_PARTS if cut else 1):
            # Interpreted stores write masked elements too: they go to a spare slot.
            there = exists & (part < parts)
            plgpu.store(items_ref.at[jnp.where(there, place + part, slots)], row * MOST_PARTS + part, mask=there)
        plgpu.store(parts_ref.at[jnp.where(exists, row, rows)], slot * MOST_PARTS + parts - 1, mask=exists)
        count_ref[0] = count

    items, count, parts_of = triton_call(
        kernel,
        "xsake_work_order",
        (pl.cdiv(rows, _ROWS), sections),
        [(pointers, whole(None, section, n + 1))],
        [
            ((sections, slots + 1), jnp.int32, whole(None, slots + 1)),
            ((1,), jnp.int32, whole(1)),
            ((sections, rows + 1), jnp.int32, whole(None, rows + 1)),
        ],
        num_warps=_WARPS,
    )
    return WorkOrder(items, count, parts_of)


def _sum(x: Array, axis: int | None = None) -> Array:
    return x.sum(axis, dtype=jnp.int32)
