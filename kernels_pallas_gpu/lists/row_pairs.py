"""Lists of pairs of neighbouring mask rows, for two warpgroups that share what they load.

A warpgroup takes the 64 queries of one row. A block that both rows list is loaded once. The other blocks are ordered so
that both warpgroups multiply in every step, as long as both rows have blocks left:

    first row    0 1 2 5 7            both        1 2       a step of two blocks, for both warpgroups
    second row   1 2 3                by turns    0 3       a step of one block for each
                                      rest        5 7       a step of two blocks, for the first warpgroup

Pallas-Triton lowers this to one kernel; XLA would need several kernels and dense arrays of all blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Int

from xsake.hads.mask.lists.triton_call import iota, triton_call, whole

OWNERS = 4  # an entry is OWNERS * block, + 1 if the first row lists the block, + 2 if the second row lists it
_CHUNK, _OTHERS = 128, 32  # a program compares 128 entries of a row with 32 entries of the other row at a time
_WARPS = 4


class RowPairs(NamedTuple):
    """Pair p has the entries indices[begins[p] : begins[p] + num_entries[p]]; other slots hold anything.

    `num_both`: the pair begins with so many entries that both rows list and attend to in full; an even number.
    `by_turns`: so many entries of each row follow, alternating, to which the row attends in full. `order`: the pairs,
    longest first.
    """

    indices: Int[Array, "b h slots"]
    begins: Int[Array, "b h pairs"]
    num_entries: Int[Array, "b h pairs"]
    num_both: Int[Array, "b h pairs"]
    by_turns: Int[Array, "b h pairs"]
    order: Int[Array, "b h pairs"]


def row_pairs(
    indices: Int[Array, "b h slots"], row_ptr: Int[Array, "b h rows_and_one"], num_full: Int[Array, "b h rows"]
) -> RowPairs:
    (b, h, capacity), n = indices.shape, num_full.shape[2]
    pairs = pl.cdiv(n, 2)
    all_pairs = pl.next_power_of_2(pairs)

    def kernel(
        indices_ref: Any,
        row_ptr_ref: Any,
        num_full_ref: Any,
        out_ref: Any,
        begins_ref: Any,
        entries_ref: Any,
        both_ref: Any,
        by_turns_ref: Any,
        order_ref: Any,
    ) -> None:
        pair = pl.program_id(0)

        def pointer(row: Any) -> Any:
            return jnp.minimum(row_ptr_ref[jnp.minimum(row, n)], capacity)

        first, second, end = (pointer(2 * pair + i) for i in range(3))
        rows = [_Row(indices_ref, first, second - first), _Row(indices_ref, second, end - second)]
        full = [jnp.minimum(num_full_ref[jnp.minimum(2 * pair + i, n - 1)], row.length) for i, row in enumerate(rows)]

        def in_both(i: int, block: Array, place: Array) -> Array:
            return (place < full[i]) & rows[1 - i].has(block, full[1 - i])

        def count(block: Array, place: Array, counted: Any) -> Any:
            both = in_both(0, block, place)
            last = jnp.max(jnp.where(both, place, -1))
            found = jnp.max(jnp.where(place == last, block, -1))
            return counted[0] + _sum(both), jnp.where(last >= 0, found, counted[1])

        num_both, last_block = rows[0].over(count, (jnp.int32(0), jnp.int32(-1)))
        odd = lax.rem(num_both, jnp.int32(2)) == 1
        num_both -= odd.astype(jnp.int32)
        apart = [row.length - num_both for row in rows]
        fewer = jnp.minimum(*apart)
        begin = rows[0].begin

        for i in range(2):

            def write(block: Array, place: Array, written: Any, i: int = i) -> Any:
                exists, both = place < rows[i].length, in_both(i, block, place) & ~(odd & (block == last_block))
                alone = exists & ~both
                of_both = written[0] + _before(both)
                of_alone = written[1] + _before(alone)
                by_turns = jnp.where(of_alone < fewer, 2 * of_alone + i, of_alone + fewer)
                slot = jnp.where(both, of_both, num_both + by_turns)
                written_here = exists if i == 0 else alone
                # Interpreted stores write masked elements too: they go to a spare slot.
                plgpu.store(
                    out_ref.at[jnp.where(written_here, begin + slot, capacity)],
                    block * OWNERS + jnp.where(both, 3, 1 << i),
                    mask=written_here,
                )
                return written[0] + _sum(both), written[1] + _sum(alone)

            rows[i].over(write, (jnp.int32(0), jnp.int32(0)))

        begins_ref[pair] = begin
        entries_ref[pair] = num_both + apart[0] + apart[1]
        both_ref[pair] = num_both
        by_turns_ref[pair] = jnp.minimum(*full) - num_both

        other = iota(all_pairs)
        begins, ends = (plgpu.load(row_ptr_ref.at[jnp.minimum(2 * other + i, n)]) for i in (0, 2))
        length = jnp.where(other < pairs, ends - begins, -1)
        own = row_ptr_ref[jnp.minimum(2 * pair + 2, n)] - row_ptr_ref[2 * pair]
        order_ref[_sum((length > own) | ((length == own) & (other < pair)))] = pair

    per_pair = ((b, h, pairs), jnp.int32, whole(None, None, pairs))
    found = triton_call(
        kernel,
        "xsake_row_pairs",
        (pairs, h, b),
        [(x, whole(None, None, x.shape[2])) for x in (indices, row_ptr, num_full)],
        [((b, h, capacity + 1), jnp.int32, whole(None, None, capacity + 1)), *[per_pair] * 5],
        num_warps=_WARPS,
    )
    return RowPairs(*found)


class _Row(NamedTuple):
    indices: Any
    begin: Any
    length: Any

    def over(self, body: Callable[[Array, Array, Any], Any], carry: Any) -> Any:
        """carry = body(blocks, places of the blocks in the row, carry) for each chunk; past the end a block is -1."""

        def step(chunk: Any, carry: Any) -> Any:
            place = chunk * _CHUNK + iota(_CHUNK)
            return body(self.load(place), place, carry)

        return lax.fori_loop(jnp.int32(0), lax.div(self.length + (_CHUNK - 1), jnp.int32(_CHUNK)), step, carry)

    def has(self, block: Array, first: Any) -> Array:
        """Which elements of `block` are among the row's first `first` entries."""

        def step(chunk: Any, found: Array) -> Array:
            place = chunk * _OTHERS + iota(_OTHERS)
            other = jnp.where(place < first, self.load(place), -1)
            return found | (block[:, None] == other[None]).astype(jnp.int32).max(1)

        steps = lax.div(first + (_OTHERS - 1), jnp.int32(_OTHERS))
        return lax.fori_loop(jnp.int32(0), steps, step, jnp.zeros(block.shape, jnp.int32)) == 1

    def load(self, place: Array) -> Array:
        inside = place < self.length
        return plgpu.load(self.indices.at[jnp.where(inside, self.begin + place, 0)], mask=inside, other=-1)


def _before(x: Array) -> Array:
    ones = x.astype(jnp.int32)
    return jnp.cumsum(ones, 0) - ones


def _sum(x: Array) -> Array:
    return x.astype(jnp.int32).sum(dtype=jnp.int32)
