"""The order in which a forward's workers take the rows of several heads: the longest first, very long ones in parts.

A chunk of a prompt has few rows, and those of a head that looks broadly are much longer than others. Each worker would
take three or so, and the worker with the longest would keep the others waiting. One kernel finds the order, another
merges the results of rows that were cut by their lse, which rounds them once more than others. Lowered by
Pallas-Triton: XLA would sort in several kernels.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float, Int

from xsake.hads.mask.triton_call import iota, triton_call, whole

MOST_PARTS = 4  # of a row
LEAST_BLOCKS = 16  # of a part: fewer would not pay for the merge
MOST_ITEMS = (1 << 15) - 1  # so that two numbers of them are one number of 32 bits
_ROWS, _OTHERS = 8, 1024  # rows of a program, and rows at most that they are compared with at a time
_WARPS = 8
_HIGH = MOST_ITEMS + 1


class WorkOrder(NamedTuple):
    """Rows are numbered head * n + row, the head counted in its section.

    `items`: row * MOST_PARTS + part, in the order of the work; there are `count` of them in every section, and what
    follows is anything. `parts_of`: for every row its number of parts less one and, if it is cut, MOST_PARTS times the
    number of its first part among the parts of all such rows; after the last row follows a number that means nothing.
    """

    items: Int[Array, "sections slots"]
    count: Int[Array, "1"]
    parts_of: Int[Array, "sections rows_and_one"]


def room_for_parts(workers: int) -> int:
    """Parts at most: a row that is cut is longer than a worker's share, and its parts longer than half of that."""
    return 2 * workers


def work_order(row_ptr: Int[Array, "b h pointers"], *, section: int, workers: int, cut: bool) -> WorkOrder:
    """Of `section` heads at a time. `cut` needs all heads in one section: rows beyond a worker's share are cut."""
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
            """Parts of a row, 0 if there is no such row, and the blocks of its longest part."""
            length, exists = length_of(row), row < rows
            if not cut:
                return exists.astype(jnp.int32), length
            parts = jnp.clip(lax.div(length + (share - 1), jnp.broadcast_to(share, length.shape)), 1, MOST_PARTS)
            return jnp.where(exists, parts, 0), lax.div(length + (parts - 1), parts)

        row = pl.program_id(0) * _ROWS + iota(_ROWS)
        exists = row < rows
        parts, longest = parts_and_longest(row)

        def add(step: Any, carry: Any) -> Any:
            """Two numbers in one: parts of all rows, and _HIGH times parts of rows that are cut."""
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
            # Interpretation writes masked elements too: a spare slot takes those.
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


def merged(
    order: WorkOrder,
    out: Float[Array, "B T H Dv"],
    lse: Float[Array, "B H N"],
    parts: Float[Array, "P block Dv"],
    parts_lse: Float[Array, "P block"],
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H N"]]:
    """`out` and `lse` with the results of rows that were cut, from those of their parts."""
    (_, length, heads, dim), (_, _, padded), block = out.shape, lse.shape, parts.shape[1]
    n, width = padded // block, min(dim & -dim, 64)  # columns at a time

    def kernel(
        of_row: Any, parts_ref: Any, parts_lse_ref: Any, _out: Any, _lse: Any, out_ref: Any, lse_ref: Any
    ) -> None:
        number = pl.program_id(0)
        first, last = (f(of_row[0, number], jnp.int32(MOST_PARTS)) for f in (lax.div, lax.rem))

        @pl.when(last > 0)
        def _merge() -> None:
            head, row = lax.div(number, jnp.int32(n)), lax.rem(number, jnp.int32(n))
            batch, head = lax.div(head, jnp.int32(heads)), lax.rem(head, jnp.int32(heads))
            rows = pl.ds(row * block, block)

            def lse_of(part: int) -> Array:
                there = jnp.broadcast_to(part <= last, (block,))
                return plgpu.load(parts_lse_ref.at[first + part, pl.ds(0, block)], mask=there, other=-jnp.inf)

            own = [lse_of(part) for part in range(MOST_PARTS)]
            peak = functools.reduce(jnp.maximum, own)
            safe = jnp.where(peak == -jnp.inf, 0.0, peak)
            weights = [jnp.exp(x - safe) for x in own]
            total = functools.reduce(jnp.add, weights)
            inverse = jnp.where(total == 0.0, 0.0, 1.0 / total)
            exists = jnp.broadcast_to((row * block + iota(block) < length)[:, None], (block, width))
            for begin in range(0, dim, width):
                columns, found = pl.ds(begin, width), jnp.zeros((block, width), jnp.float32)
                for part, weight in enumerate(weights):
                    there = jnp.broadcast_to(part <= last, (block, width))
                    x = plgpu.load(parts_ref.at[first + part, pl.ds(0, block), columns], mask=there, other=0.0)
                    found += x.astype(jnp.float32) * (weight * inverse)[:, None]
                plgpu.store(out_ref.at[batch, rows, head, columns], found.astype(out_ref.dtype), mask=exists)
            lse_ref[batch, head, rows] = jnp.where(total == 0.0, -jnp.inf, safe + jnp.log(total))

    arrays = (order.parts_of, parts, parts_lse, out, lse)
    found, found_lse = triton_call(
        kernel,
        "xsake_merge_rows",
        (order.parts_of.shape[1] - 1,),
        [(x, whole(*x.shape)) for x in arrays],
        [(x.shape, x.dtype, whole(*x.shape)) for x in (out, lse)],
        num_warps=4,
        aliases={3: 0, 4: 1},
    )
    return found, found_lse
