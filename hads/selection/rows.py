"""Rows: the rows of blocks that a choice is made for, all of a sequence or a chunk of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.packed import Packed


class Rows(NamedTuple):
    """The rows of a grid from row `first` on, for sequences of these lengths; None means that all tokens exist.

    `answers` say where a conversation's earlier answers begin, 0 for none: a question stands before each of them as
    before the sequence's end, so that the rows before them are last rows, too.

    `span` [B, 2] says which tokens of each sequence ask, where that is not known while tracing: those from the first
    on, before the second, where the keys end too. Rows without such a token get nothing. For XLA's program alone.

    `packed` says which documents a whole sequence holds. Rows and blocks count from their document's first ones, and
    every document has last rows; only the sequence's last ones are exact. For XLA's program alone.

    XLA's program takes masks of the rows' blocks and tokens. A kernel gets the lengths as an `input`, and passes its
    reference to the methods that ask for `length_ref`.
    """

    grid: CausalGrid
    first: int = 0
    lengths: Int[Array, "B"] | None = None
    answers: Int[Array, "B A"] | None = None
    span: Int[Array, "B 2"] | None = None
    packed: Packed | None = None

    @property
    def number(self) -> int:
        return self.grid.rows - self.first

    @property
    def first_block(self) -> int:
        """The first block of keys that is as late as the rows."""
        return self.first * self.grid.tall

    @property
    def short(self) -> bool:
        """Whether a row or a block may have fewer tokens than others."""
        return self.lengths is not None or self.grid.length % self.grid.block_q > 0

    # -- for XLA's program

    def allowed(self) -> Bool[Array | np.ndarray, "#B 1 rows n"]:
        """The blocks that causality and the window allow, where the sequence has tokens."""
        causal = self.grid.causal()[None, None, self.first :]
        if self.packed is not None:
            return causal & self.packed.visible(self.grid)
        if self.lengths is None:
            return causal
        begin, end = jnp.zeros_like(self.lengths)[:, None], self.lengths[:, None]
        if self.span is not None:
            begin, end = self.span[:, :1], self.span[:, 1:]
        column = jnp.arange(self.grid.columns, dtype=jnp.int32)[None] * self.grid.block < end
        rows = self._between(begin // self.grid.block_q, self.grid.rows_of(end))
        return rows & column[:, None, None] & causal

    def weights(self) -> Float[Array | np.ndarray, "#B 1 rows 1"]:
        """How much an error in each row counts (`Rule.last_weight`)."""
        if self.lengths is None and self.packed is None:
            return self.grid.row_weights()[None, None, self.first :, None]
        return jnp.where(self.last(), jnp.float32(self.grid.rule.last_weight), 1.0)

    def last(self) -> Bool[Array | np.ndarray, "#B 1 rows 1"]:
        """The last rows of a sequence and before each answer (`CausalGrid.first_last`)."""
        if self.packed is not None:
            return self.packed.row(self.grid) >= self.grid.first_last(self.packed.length(self.grid))
        if self.lengths is None:
            return self.grid.last_rows()[None, None, self.first :, None]
        ends = self.ends()
        return self._between(self.grid.first_last(ends), self.grid.rows_of(ends))

    def row(self) -> Int[Array, "#B 1 rows #n"]:
        """The numbers of the rows."""
        if self.packed is not None:
            return self.packed.row(self.grid)
        return jnp.arange(self.first, self.grid.rows, dtype=jnp.int32)[None, None, :, None]

    def column(self) -> Int[Array, "#B 1 #rows n"]:
        """The numbers of the blocks of keys."""
        if self.packed is not None:
            return self.packed.column(self.grid)
        return jnp.arange(self.grid.columns, dtype=jnp.int32)[None, None, None]

    def exact_mask(self) -> Bool[Array | np.ndarray, "#B 1 rows 1"]:
        """The rows whose masses are exact."""
        if not self.exact:
            return np.zeros((1, 1, self.number, 1), bool)
        if self.lengths is None:
            row = np.arange(self.first, self.grid.rows, dtype=np.int32)[None, None, :, None]
            return row >= self.grid.first_exact(self.grid.length)
        ends = self.ends()
        return self._between(self.grid.first_exact(ends), self.grid.rows_of(ends))

    def ends(self) -> Int[Array, "B A_and_one"]:
        """Where each sequence ends, and where the questions before its answers do, 0 for none."""
        if self.lengths is None:
            raise ValueError("answers are of sequences whose lengths are given")
        return self.lengths[:, None] if self.answers is None else jnp.column_stack([self.lengths, self.answers])

    def _between(self, first: Int[Array, "B E"], end: Int[Array, "B E"]) -> Bool[Array, "B 1 rows 1"]:
        """The rows from the first one to the end of any of these."""
        row = jnp.arange(self.first, self.grid.rows, dtype=jnp.int32)[None, None]
        inside = (row >= first[..., None]) & (row < end[..., None])
        return inside.any(1)[:, None, :, None]

    def queries(self) -> Bool[Array | np.ndarray, "#B rows block_q"] | None:
        """Which tokens of the rows exist; None means all."""
        exist = self._tokens(self.first, self.grid.rows, self.grid.block_q)
        if self.span is None or exist is None:
            return exist
        return exist & (self._places(self.first, self.grid.rows, self.grid.block_q) >= self.span[:, :1, None])

    def keys(self, first: int = 0) -> Bool[Array | np.ndarray, "#B n block"] | None:
        """Which tokens of the blocks of keys from block `first` on exist; None means all."""
        return self._tokens(first, self.grid.columns, self.grid.block)

    def _tokens(self, first: int, end: int, size: int) -> Bool[Array | np.ndarray, "#B n size"] | None:
        if not self.short:
            return None
        place = self._places(first, end, size)
        if self.lengths is None:
            return place < self.grid.length
        last = self.lengths if self.span is None else self.span[:, 1]
        return place < jnp.minimum(last, self.grid.length)[:, None, None]

    def _places(self, first: int, end: int, size: int) -> Int[np.ndarray, "1 n size"]:
        return np.arange(first * size, end * size, dtype=np.int32).reshape(1, end - first, size)

    # -- for both: rows with exact masses

    @property
    def number_of_ends(self) -> int:
        return 1 if self.answers is None else 1 + self.answers.shape[1]

    @property
    def exact(self) -> int:
        """How many rows, at most, hold one of the last `Rule.exact_queries` before an end: their masses are exact."""
        queries, block_q = self.grid.rule.exact_queries, self.grid.block_q
        if self.lengths is None:
            return self.grid.rows - max(self.grid.first_exact(self.grid.length), self.first) if queries else 0
        return min(-(-queries // block_q) + 1, self.number) if queries else 0

    def begin_of_exact(self, end: Any) -> Any:
        """The first of `exact` rows, one after the other, that hold those from `first_exact` on."""
        most = self.grid.rows - self.exact
        begin = self.grid.first_exact(end)
        return min(max(begin, self.first), most) if isinstance(begin, int) else jnp.clip(begin, self.first, most)

    # -- for kernels

    def input(self, batch: int) -> tuple[Array, Any]:
        """The ends and their block spec: a program sees those of its sequence, the length first."""
        from xsake.hads.mask.lists.triton_call import whole

        ends = jnp.full((batch, 1), self.grid.length, jnp.int32) if self.lengths is None else self.ends()
        return ends, whole(None, ends.shape[1])

    def end(self, length_ref: Any, number: Any = 0) -> Any:
        """How many tokens the sequence has, beyond the grid too; or another of its `ends`."""
        return self.grid.length if self.lengths is None else length_ref[number]

    def weight(self, row: Array, length_ref: Any) -> Array:
        """How much an error in a row counts (`weights`)."""
        weight = jnp.ones(row.shape, jnp.float32)
        for number in range(self.number_of_ends):
            end = self.end(length_ref, number)
            is_last = (row < self.grid.rows_of(end)) & (row >= self.grid.first_last(end))
            weight = jnp.where(is_last, jnp.float32(self.grid.rule.last_weight), weight)
        return weight

    def blocks_of(self, row: Any, length_ref: Any) -> Any:
        """How many blocks of keys a row that exists has, from the first one on."""
        if self.grid.tall == 1:
            return row + 1
        columns: Any = self.grid.columns
        if self.lengths is not None:
            end = jnp.minimum(length_ref[0], self.grid.length)
            columns = lax.div(end + (self.grid.block - 1), jnp.int32(self.grid.block))
        return jnp.minimum((row + 1) * self.grid.tall, columns)

    def tokens_in(self, number: Array, size: int, length_ref: Any) -> Array | None:
        """How many tokens of a row or a block, of `size` tokens, exist; None means all."""
        if not self.short:
            return None
        end = jnp.minimum(length_ref[0], self.grid.length)
        return jnp.clip(end - number * size, 0, size)
