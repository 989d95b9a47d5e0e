"""Layout: the one sequence that a ragged batch is to a backend, and the lists of its rows."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from xsake._op.ragged_batch import Batch
from xsake.hads.mask.band import Band
from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.mask.lists.compact import compact
from xsake.hads.mask.lists.rows import finished, rows_of_slots


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The one sequence that a batch is to a backend.

    Rows begin at multiples of `block_q` in their request, so that a row and the diagonal meet as in a sequence alone:
    row r holds the tokens from `row[r] * block_q` on of request `owner[r]`, if it is `live`. Every request has
    `columns` blocks of keys, one request after the other.
    """

    batch: Batch
    tokens: int
    block_q: int
    block_kv: int
    page: int

    @property
    def rows(self) -> int:
        """Rows at most: n tokens touch no more than (n - 2) / block_q + 2 rows."""
        requests = min(self.batch.requests, self.tokens)
        return (self.tokens - 2 * requests) // self.block_q + 2 * requests

    @property
    def columns(self) -> int:
        return -(-self.batch.page_table.shape[1] * self.page // self.block_kv)

    @property
    def table(self) -> Int[Array, "one n"]:
        """The pages of all requests, each filled up to whole blocks."""
        whole = math.lcm(self.block_kv, self.page) // self.page
        table = self.batch.page_table
        return jnp.pad(table, ((0, 0), (0, -table.shape[1] % whole))).reshape(1, -1)

    @property
    def stride(self) -> int:
        """Slots of keys per request."""
        return self.table.shape[1] // self.batch.requests * self.page

    @property
    def first_row(self) -> Int[Array, "B"]:
        """The number, in its request, of each request's first row."""
        return self.batch.starts // self.block_q

    @property
    def row_begins(self) -> Int[Array, "B_and_one"]:
        """Where the rows of each request begin among all rows, and where the last request's rows end."""
        batch = self.batch
        number = (batch.kv_lengths - 1) // self.block_q - self.first_row + 1
        return _sums(jnp.where(batch.queries > 0, number, 0))

    def of_rows(self) -> tuple[Int[Array, "R"], Int[Array, "R"], Bool[Array, "R"]]:
        """(owner, row, live)"""
        begins = self.row_begins
        owner = rows_of_slots(jnp, begins, self.rows)
        live = owner < self.batch.requests
        owner = jnp.minimum(owner, self.batch.requests - 1)
        within = jnp.arange(self.rows, dtype=jnp.int32) - begins[owner]
        return owner, within + self.first_row[owner], live

    def places(self) -> tuple[Int[Array, "R q"], Int[Array, "R q"], Bool[Array, "R q"]]:
        """(the query, its position in the request, whether there is one) of every place in the rows."""
        owner, row, live = self.of_rows()
        batch = self.batch
        position = row[:, None] * self.block_q + jnp.arange(self.block_q, dtype=jnp.int32)[None]
        start, end = batch.starts[owner][:, None], batch.kv_lengths[owner][:, None]
        there = (position >= start) & (position < end) & live[:, None]
        token = jnp.clip(position - start + batch.cu_seqlens[owner][:, None], 0, self.tokens - 1)
        return token, position, there

    def slots(self) -> Int[Array, "T"]:
        """The place in the rows of every query; that of padding does not matter."""
        batch = self.batch
        owner, token = batch.owners(self.tokens), jnp.arange(self.tokens, dtype=jnp.int32)
        position = token - batch.cu_seqlens[owner] + batch.starts[owner]
        row = self.row_begins[owner] + position // self.block_q - self.first_row[owner]
        return jnp.clip(row * self.block_q + position % self.block_q, 0, self.rows * self.block_q - 1)

    def spans(self, band: Band) -> tuple[Array, Array, Array, Array]:
        """(first, full_first, full_end, end), i32[R] each: the blocks that a row's tokens may attend to by the rule,
        and those between that they all attend to wholly.
        """
        batch, (owner, row, live) = self.batch, self.of_rows()
        length = batch.kv_lengths[owner]
        low = jnp.maximum(row * self.block_q, batch.starts[owner])
        high = jnp.minimum((row + 1) * self.block_q, length) - 1  # the last query
        first, full_first, end, full_end = jnp.zeros_like(low), jnp.zeros_like(low), length, length
        if band.right is not None:
            end, full_end = (jnp.minimum(length, x + band.right + 1) for x in (high, low))
        if band.left is not None:
            first, full_first = (jnp.maximum(x - band.left, 0) for x in (low, high))
        block = self.block_kv
        first, end = first // block, jnp.where(live, -(-end // block), 0)
        first = jnp.minimum(first, end)
        full_first = jnp.clip(-(-full_first // block), first, end)
        return first, full_first, jnp.clip(full_end // block, full_first, end), end

    def mask(self, rows: tuple[Array, ...]) -> BlockMask:
        """The mask with these finished lists."""
        sizes: dict[str, Any] = dict(block_q=self.block_q, block_kv=self.block_kv)
        sizes |= dict(q_len=self.rows * self.block_q, kv_len=self.batch.requests * self.stride)
        return dataclasses.replace(BlockMask.of_finished(rows, **sizes, is_causal=False), complete=True)

    def dense(self, band: Band) -> BlockMask:
        first, full_first, full_end, end = self.spans(band)
        capacity = max(self.rows * self.columns, 1)
        row_ptr = _sums(end - first)
        row = jnp.minimum(rows_of_slots(jnp, row_ptr, capacity), self.rows - 1)
        entry, full = jnp.arange(capacity, dtype=jnp.int32) - row_ptr[row], full_end - full_first
        partial = first[row] + entry - full[row]  # after the full blocks those before them, then those after them
        partial = jnp.where(partial < full_first[row], partial, partial + full[row])
        number = jnp.where(entry < full[row], full_first[row] + entry, partial)
        return self._listed(number[None, None], row_ptr[None, None], full[None, None], row[None, None])

    def chosen(self, blocks: Bool[Array, "H R n"], band: Band) -> BlockMask:
        """The mask of the chosen blocks of each row's own request; the rule holds inside them."""
        first, full_first, full_end, end = (x[:, None] for x in self.spans(band))
        column = jnp.arange(self.columns, dtype=jnp.int32)[None]
        full = (column >= full_first) & (column < full_end)
        active = blocks & ((column >= first) & (column < end))[None]
        capacity = max(self.rows * self.columns, 1)
        lists, row_ptr, num_full = compact(active[None], full, capacity)
        row = jnp.minimum(rows_of_slots(jnp, row_ptr, capacity), self.rows - 1)
        return self._listed(lists, row_ptr, num_full, row)

    def _listed(self, number: Array, row_ptr: Array, full: Array, row: Array) -> BlockMask:
        own = self.of_rows()[0][row] * (self.stride // self.block_kv)
        return self.mask(finished(jnp, number + own, row_ptr, full))


def _sums(x: Array) -> Array:
    """The sums of no number, of the first, of the first two, and so on."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(x, dtype=jnp.int32)])
