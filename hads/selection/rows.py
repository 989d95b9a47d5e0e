"""Rows: the rows of blocks that a choice is made for, all of a sequence or a chunk of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from xsake.hads.profile.causal_grid import CausalGrid


class Rows(NamedTuple):
    """The rows of a grid from row `first` on, for sequences of these lengths; None means that all tokens exist.

    XLA's program takes masks of the rows' blocks and tokens. A kernel gets the lengths as an `input`, and passes its
    reference to the methods that ask for `length_ref`.
    """

    grid: CausalGrid
    first: int = 0
    lengths: Int[Array, "B"] | None = None

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
        if self.lengths is None:
            return causal
        row, rows = self._rows_of_each()
        column = jnp.arange(self.grid.columns, dtype=jnp.int32)[None] * self.grid.block < self.lengths[:, None]
        return (row < rows)[:, None, :, None] & column[:, None, None] & causal

    def weights(self) -> Float[Array | np.ndarray, "#B 1 rows 1"]:
        """How much an error in each row counts (`Rule.row_weight`)."""
        if self.lengths is None:
            return self.grid.row_weights()[None, None, self.first :, None]
        return self.grid.rule.row_weight(*self._rows_of_each()).astype(jnp.float32)[:, None, :, None]

    def exact_mask(self) -> Bool[Array | np.ndarray, "#B 1 rows 1"]:
        """The rows whose masses are exact."""
        if not self.exact:
            return np.zeros((1, 1, self.number, 1), bool)
        row = np.arange(self.first, self.grid.rows, dtype=np.int32)[None, None, :, None]
        if self.lengths is None:
            return row >= self.first_exact(self.grid.length)
        return row >= self.first_exact(self.lengths)[:, None, None, None]

    def _rows_of_each(self) -> tuple[Int[Array, "1 rows"], Int[Array, "B 1"]]:
        """(the numbers of the rows; how many rows each sequence has)"""
        assert self.lengths is not None
        rows = (self.lengths + self.grid.block_q - 1) // self.grid.block_q
        return jnp.arange(self.first, self.grid.rows, dtype=jnp.int32)[None], rows[:, None]

    def queries(self) -> Bool[Array | np.ndarray, "#B rows block_q"] | None:
        """Which tokens of the rows exist; None means all."""
        return self._tokens(self.first, self.grid.rows, self.grid.block_q)

    def keys(self, first: int = 0) -> Bool[Array | np.ndarray, "#B n block"] | None:
        """Which tokens of the blocks of keys from block `first` on exist; None means all."""
        return self._tokens(first, self.grid.columns, self.grid.block)

    def _tokens(self, first: int, end: int, size: int) -> Bool[Array | np.ndarray, "#B n size"] | None:
        if not self.short:
            return None
        place = np.arange(first * size, end * size, dtype=np.int32).reshape(1, end - first, size)
        if self.lengths is None:
            return place < self.grid.length
        return place < jnp.minimum(self.lengths, self.grid.length)[:, None, None]

    # -- for both: rows with exact masses

    @property
    def exact(self) -> int:
        """How many rows, at most, hold one of a sequence's last `Rule.exact_queries`: their masses are exact."""
        queries, block_q = self.grid.rule.exact_queries, self.grid.block_q
        if self.lengths is None:
            return self.grid.rows - max(self.first_exact(self.grid.length), self.first) if queries else 0
        return min(-(-queries // block_q) + 1, self.number) if queries else 0

    def first_exact(self, length: Any) -> Any:
        """The first row of a sequence of this length that holds one of its last `Rule.exact_queries`."""
        back, block_q = length - self.grid.rule.exact_queries, self.grid.block_q
        return max(back, 0) // block_q if isinstance(back, int) else lax.div(jnp.maximum(back, 0), jnp.int32(block_q))

    def begin_of_exact(self, length: Any) -> Any:
        """The first of `exact` rows, one after the other, that hold those from `first_exact` on."""
        most = self.grid.rows - self.exact
        begin = self.first_exact(length)
        return min(max(begin, self.first), most) if isinstance(begin, int) else jnp.clip(begin, self.first, most)

    # -- for kernels

    def input(self, batch: int) -> tuple[Array, Any]:
        """The lengths and their block spec: a program sees the length of its sequence."""
        from xsake.hads.mask.lists.triton_call import whole

        lengths = jnp.full(batch, self.grid.length, jnp.int32) if self.lengths is None else self.lengths
        return lengths[:, None], whole(None, 1)

    def rows_of(self, length_ref: Any) -> Any:
        """How many rows of blocks the sequence has."""
        if self.lengths is None:
            return self.grid.rows
        return lax.div(length_ref[0] + (self.grid.block_q - 1), jnp.int32(self.grid.block_q))

    def end(self, length_ref: Any) -> Any:
        """How many tokens the sequence has, beyond the grid too."""
        return self.grid.length if self.lengths is None else length_ref[0]

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
