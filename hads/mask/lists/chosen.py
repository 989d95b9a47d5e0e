"""Lists of blocks that single tokens have chosen, made under jit by sorting the choices.

    key = ((head * nQ + row) * nK + column) * block_q + query in its block

A listed block is a run of sorted keys with one (head, row, column). Work and memory grow with the number of choices: no
array has an entry for each of the nQ * nK blocks. Heads of all batches lie in one flat array, which GPUs sort by radix.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int, UInt

from xsake._ground.trace import jit_may_partition
from xsake.hads.mask.bitmaps import words_of
from xsake.hads.mask.grid import Grid

_NONE = np.uint32(2**32 - 1)  # a key past all others


class Lists(NamedTuple):
    """Rows as `compact.compact` makes them, and which bitmap each slot has."""

    indices: Int[Array, "b h slots"]
    row_ptr: Int[Array, "b h rows_and_one"]
    num_full: Int[Array, "b h rows"]
    bitmap: Int[Array, "b h slots"]


class Sorted(NamedTuple):
    rows: Lists
    columns: Lists | None
    bitmaps: UInt[Array, "b h slots 1 words"]


class _Runs(NamedTuple):
    """Listed blocks, ascending; after the last one, entries whose row is heads * nQ."""

    row: Int[Array, "N"]  # head * nQ + row
    column: Int[Array, "N"]
    words: UInt[Array, "N words"]
    full: Bool[Array, "N"]


def sorted_lists(column: Int[Array, "b t h n"], grid: Grid, capacity: int, transpose: bool) -> Sorted | None:
    """The lists of what each token chose (nK or more: nothing); None where a key of one head needs over 32 bits."""
    b, _, h, _ = column.shape
    make = partial(_lists, grid=grid, capacity=capacity, transpose=transpose)
    if _fits(b * h, column.size, grid, capacity) and not jit_may_partition():
        return make(column.astype(jnp.int32))
    if not _fits(1, column.size // (b * h), grid, capacity):
        return None

    def of_head(column: Array) -> Any:
        return jax.tree.map(lambda x: x[0, 0], make(column[None, :, None]))

    # Head by head: jit partitions this over batch and heads, where it would gather one flat array.
    return jax.vmap(jax.vmap(of_head, in_axes=1))(column.astype(jnp.int32))


def _fits(heads: int, choices: int, grid: Grid, capacity: int) -> bool:
    keys = heads * grid.num_q * grid.num_kv * max(grid.block_q, 2)  # the transposed lists need a factor of 2
    return keys < 2**32 and max(heads * capacity, choices) < 2**31 - 1


def _lists(column: Int[Array, "b t h n"], *, grid: Grid, capacity: int, transpose: bool) -> Sorted:
    b, _, h, _ = column.shape
    runs = _runs(column, grid)
    row_ends = _searched(runs.row, b * h * grid.num_q)
    first = row_ends[: -1 : grid.num_q]  # of each head's runs
    rows = _rows(runs, row_ends, first, grid, capacity)
    columns = _columns(runs, first, grid, capacity) if transpose else None
    slot = first[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None]
    bitmaps = runs.words[jnp.minimum(slot, column.size - 1)][:, :, None]
    return jax.tree.map(lambda x: x.reshape(b, h, *x.shape[1:]), Sorted(rows, columns, bitmaps))


def _runs(column: Int[Array, "b t h n"], grid: Grid) -> _Runs:
    b, t, h, _ = column.shape
    block_q, width, num_rows = grid.block_q, grid.num_kv, b * h * grid.num_q
    batch, token, head = (jax.lax.broadcasted_iota(jnp.int32, (b, t, h, 1), axis) for axis in range(3))
    row = token // block_q
    listed = (column >= 0) & (column < width) & grid.is_allowed(jnp, row, column)
    block = ((batch * h + head) * grid.num_q + row).astype(jnp.uint32) * np.uint32(width) + column.astype(jnp.uint32)
    key = jnp.where(listed, block * np.uint32(block_q) + (token % block_q).astype(jnp.uint32), _NONE)
    key = jnp.sort(key.reshape(-1), stable=False)

    def place(key: Array) -> Array:
        """The query in its block."""
        return key % np.uint32(block_q)

    def bit(key: Array, word: int) -> Array:
        return jnp.where(place(key) // 32 == word, np.uint32(1) << (place(key) % 32), np.uint32(0))

    before = jnp.concatenate([jnp.full(1, _NONE), key[:-1]])
    new = (key != before) & (key != _NONE)  # a number that a token repeats counts once
    starts = new & (key // np.uint32(block_q) != before // np.uint32(block_q))
    start = _positions(starts)
    end = jnp.concatenate([start[1:], jnp.full(1, len(key), jnp.int32)]) - 1

    key_at_start = key.at[start].get(mode="fill", fill_value=_NONE, wrap_negative_indices=False)
    words = []
    for word in range(words_of(block_q)):
        # Sums wrap around. Differences are exact: a run's bits are distinct, and so their sum is below 2**32.
        total = jnp.cumsum(jnp.where(new, bit(key, word), np.uint32(0)), dtype=jnp.uint32)
        at_end, at_start = (total.at[x].get(mode="clip", wrap_negative_indices=False) for x in (end, start))
        words.append(jnp.where(key_at_start != _NONE, at_end - at_start + bit(key_at_start, word), np.uint32(0)))
    block = key_at_start // np.uint32(block_q)
    row = jnp.minimum(block // np.uint32(width), np.uint32(num_rows)).astype(jnp.int32)
    column = (block % np.uint32(width)).astype(jnp.int32)
    chosen_by = sum(jax.lax.population_count(x).astype(jnp.int32) for x in words)
    full = (chosen_by == block_q) & grid.is_full(row % grid.num_q, column)
    return _Runs(row, column, jnp.stack(words, -1), full)


def _rows(runs: _Runs, row_ends: Array, first: Array, grid: Grid, capacity: int) -> Lists:
    """The runs are in place already but for full blocks, which come first in their row."""
    heads, number = len(first), jnp.arange(len(runs.row), dtype=jnp.int32)
    full = jnp.cumsum(runs.full, dtype=jnp.int32)
    full_before = jnp.where(row_ends > 0, full[jnp.maximum(row_ends - 1, 0)], 0)  # each row
    of_head = jnp.repeat(first, grid.num_q)
    full_slot = (row_ends[:-1] - full_before[:-1] - of_head)[runs.row] + full - 1
    partial_slot = (full_before[1:] - of_head)[runs.row] + number - full
    slot = jnp.where(runs.full, full_slot, partial_slot)
    inside = (runs.row < heads * grid.num_q) & (slot < capacity)
    place = jnp.where(inside, runs.row // grid.num_q * capacity + slot, heads * capacity)  # out of range: dropped
    run = jnp.zeros(heads * capacity, jnp.int32).at[place].set(number, mode="drop", unique_indices=True)
    run = run.reshape(heads, capacity)
    num_full = jnp.diff(full_before).reshape(heads, -1)
    return Lists(runs.column[run], _row_ptr(row_ends, grid.num_q), num_full, _bitmap(run, first))


def _columns(runs: _Runs, first: Array, grid: Grid, capacity: int) -> Lists:
    """Sorted by column, then full before partial, then row."""
    heads, number = len(first), jnp.arange(len(runs.row), dtype=jnp.int32)
    head, row = runs.row // grid.num_q, runs.row % grid.num_q
    part = ((head * grid.num_kv + runs.column) * 2 + (~runs.full).astype(jnp.int32)).astype(jnp.uint32)
    key = jnp.where(head < heads, part * np.uint32(grid.num_q) + row.astype(jnp.uint32), _NONE)
    key, run = jax.lax.sort((key, number), num_keys=1, is_stable=False)
    part = jnp.minimum(key // np.uint32(grid.num_q), np.uint32(heads * grid.num_kv * 2)).astype(jnp.int32)
    part_ends = _searched(part, heads * grid.num_kv * 2)
    num_full = (part_ends[1::2] - part_ends[:-1:2]).reshape(heads, -1)
    slot = jnp.minimum(first[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None], len(key) - 1)
    row = (key[slot] % np.uint32(grid.num_q)).astype(jnp.int32)
    return Lists(row, _row_ptr(part_ends[::2], grid.num_kv), num_full, _bitmap(run[slot], first))


def _positions(chosen: Bool[Array, "N"]) -> Int[Array, "N"]:
    """Where `chosen` is true, ascending, then N."""
    (size,) = chosen.shape
    place = jnp.where(chosen, jnp.cumsum(chosen, dtype=jnp.int32) - 1, size)  # out of range: dropped
    position = jnp.arange(size, dtype=jnp.int32)
    return jnp.full(size, size, jnp.int32).at[place].set(position, mode="drop", unique_indices=True)


def _searched(ascending: Int[Array, "N"], count: int) -> Int[Array, "count_and_one"]:
    """How many entries are below each of 0, 1, ..., count."""
    return jnp.searchsorted(ascending, jnp.arange(count + 1, dtype=jnp.int32), method="scan_unrolled").astype(jnp.int32)


def _row_ptr(ends: Int[Array, "all_rows_and_one"], rows: int) -> Int[Array, "heads rows_and_one"]:
    """Row pointers per head, from the ends of all heads' rows."""
    first = ends[:-1].reshape(-1, rows)
    return jnp.concatenate([first, ends[rows::rows, None]], -1) - first[:, :1]


def _bitmap(run: Int[Array, "heads slots"], first: Int[Array, "heads"]) -> Int[Array, "heads slots"]:
    """The numbers of runs in their heads; free slots, and those of lists that overflow, may have any."""
    return jnp.clip(run - first[:, None], 0, run.shape[1] - 1)
