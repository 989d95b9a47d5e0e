"""The order in which a forward's workers take the rows of several heads: the longest first, very long ones in parts.

A chunk of a prompt has few rows, and those of a head that looks broadly are much longer than others. Each worker would
take three or so, and the worker with the longest would keep the others waiting. One kernel finds the order, another
merges the results of rows that were cut by their lse. Lowered by Pallas-Triton: XLA would sort in several kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float, Int

from xsake.hads.mask.triton_call import iota, triton_call, whole

MOST_PARTS = 4  # of a row
LEAST_BLOCKS = 16  # of a part: fewer would not pay for the merge
_ROWS, _OTHERS = 8, 1024  # rows of a program, and rows at most that they are compared with at a time
_WARPS = 8
_HIGH = 1 << 16  # above every number of items


class WorkOrder(NamedTuple):
    """Rows are numbered head * n + row, the head counted in its section.

    `items`: row * MOST_PARTS + part, in the order of the work; there are `count` of them in every section, and what
    follows is anything. `parts_of`: for every row its number of parts less one, and MOST_PARTS times the number of its
    first part among the parts of all rows that are cut.
    """

    items: Int[Array, "sections slots"]
    count: Int[Array, "1"]
    parts_of: Int[Array, "sections rows"]


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
    if slots >= _HIGH:
        raise ValueError(f"{slots} items are more than this order knows: fewer than {_HIGH}")

    def kernel(pointer_ref: Any, items_ref: Any, count_ref: Any, parts_ref: Any) -> None:
        def length_of(row: Array) -> Array:
            head, place = lax.div(row, jnp.int32(n)), lax.rem(row, jnp.int32(n))
            begin, end = (plgpu.load(pointer_ref.at[head, place + i], mask=row < rows, other=0) for i in (0, 1))
            return end - begin

        def others(step: Any) -> Array:
            return step * at_once + iota(at_once)

        def over_others(add: Any, zero: Any) -> Any:
            return lax.fori_loop(0, pl.cdiv(rows, at_once), add, zero)

        if cut:
            total = over_others(lambda step, so_far: so_far + length_of(others(step)).sum(), jnp.int32(0))
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
            return before + jnp.where(earlier, both[None], 0).sum(1), count + their_parts.sum()

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


def merged(
    order: WorkOrder,
    out: Float[Array, "B T H Dv"],
    lse: Float[Array, "B H N"],
    parts: Float[Array, "P block Dv"],
    parts_lse: Float[Array, "P block"],
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H N"]]:
    """`out` and `lse` with the results of rows that were cut, from those of their parts."""
    (_, length, heads, dim), (_, _, padded), block = out.shape, lse.shape, parts.shape[1]
    n, columns = padded // block, pl.next_power_of_2(dim)

    def kernel(
        of_row: Any, parts_ref: Any, parts_lse_ref: Any, _out: Any, _lse: Any, out_ref: Any, lse_ref: Any
    ) -> None:
        number = pl.program_id(0)
        code = of_row[0, number]
        first, last = lax.div(code, jnp.int32(MOST_PARTS)), lax.rem(code, jnp.int32(MOST_PARTS))

        @pl.when(last > 0)
        def _merge() -> None:
            head, row = lax.div(number, jnp.int32(n)), lax.rem(number, jnp.int32(n))
            batch, head = lax.div(head, jnp.int32(heads)), lax.rem(head, jnp.int32(heads))
            query, column = iota(block), iota(columns)
            inside = jnp.broadcast_to((column < dim)[None], (block, columns))

            def lse_of(part: int) -> Array:
                there = jnp.broadcast_to(part <= last, (block,))
                return plgpu.load(parts_lse_ref.at[first + part, pl.ds(0, block)], mask=there, other=-jnp.inf)

            own = [lse_of(part) for part in range(MOST_PARTS)]
            peak = own[0]
            for x in own[1:]:
                peak = jnp.maximum(peak, x)
            safe = jnp.where(peak == -jnp.inf, 0.0, peak)
            weights = [jnp.exp(x - safe) for x in own]
            total = weights[0]
            for x in weights[1:]:
                total += x
            inverse = jnp.where(total == 0.0, 0.0, 1.0 / total)
            found = jnp.zeros((block, columns), jnp.float32)
            for part, weight in enumerate(weights):
                ref = parts_ref.at[first + part, pl.ds(0, block), pl.ds(0, columns)]
                x = plgpu.load(ref, mask=inside & (part <= last), other=0.0).astype(jnp.float32)
                found += x * (weight * inverse)[:, None]
            begin = row * block
            plgpu.store(
                out_ref.at[batch, pl.ds(begin, block), head, pl.ds(0, columns)],
                found.astype(out_ref.dtype),
                mask=inside & (begin + query < length)[:, None],
            )
            lse_ref[batch, head, pl.ds(begin, block)] = jnp.where(total == 0.0, -jnp.inf, safe + jnp.log(total))

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
