"""Group packing: the rows of a tile are the same few queries of all the heads that share keys, values and block lists.

A mask whose blocks have few queries would leave most of the 64 rows of a matrix product empty. Packed, a block of a K/V
head has `group * block_q` rows, and the kernels see a call with one query head per K/V head and blocks of so many rows.
Nothing is copied in global memory: a tile's queries are loaded from where they are and its output is stored likewise,
in copies of at least 8 rows. If a group has 8, 16, 32 or 64 heads, a copy takes all heads of one query: row r is head
r % group of query r // group. Otherwise a copy takes a block's queries of one head: a block has the rows of its first
head, then the rows of its second.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backend.contract import Call

ROWS = 64  # per matrix product
LEAST_ROWS = 8  # per copy: shared memory is written in tiles of 8 rows


@dataclasses.dataclass(frozen=True)
class Packing:
    """`group` heads of `block_q` queries each; a group of 1 leaves everything as it is."""

    group: int
    block_q: int

    @classmethod
    def of(cls, block_q: int, list_heads: int, num_q_heads: int, num_kv_heads: int) -> "Packing | None":
        """None where no packing fills the rows of a matrix product."""
        if block_q % ROWS == 0:
            return cls(1, block_q)
        packing = cls(num_q_heads // num_kv_heads, block_q)
        if ROWS % block_q or list_heads not in (1, num_kv_heads) or packing.rows % ROWS:
            return None
        return packing if packing.by_query or block_q >= LEAST_ROWS else None

    @classmethod
    def of_call(cls, call: Call) -> "Packing":
        packing = cls.of(call.mask.block_q, call.mask.heads, call.q_heads, call.kv_heads)
        assert packing is not None, f"block_q={call.mask.block_q} of {call.q_heads} and {call.kv_heads} heads"
        return packing

    @classmethod
    def required(cls, block_q: int, lists: Any, num_q_heads: int, num_kv_heads: int, bias: Any) -> "Packing":
        packing = cls.of(block_q, lists.indices.shape[1], num_q_heads, num_kv_heads)
        if packing is None or (packing.group > 1 and bias is not None):
            raise ValueError(f"{block_q=}: heads cannot be packed into tiles of {ROWS} rows, or there is a bias")
        return packing

    @property
    def by_query(self) -> bool:
        """Whether the heads of a query follow one another."""
        return self.group >= LEAST_ROWS and ROWS % self.group == 0

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.group * self.block_q

    @property
    def queries(self) -> int:
        """Queries among 64 rows."""
        return ROWS if self.group == 1 else ROWS // self.group if self.by_query else self.block_q

    def length(self, q_len: int) -> int:
        """Rows of all blocks, or the queries themselves where nothing is packed."""
        return q_len if self.group == 1 else pl.cdiv(q_len, self.block_q) * self.rows

    @property
    def rows_per_copy(self) -> int:
        return self.group if self.by_query else self.block_q

    def pieces(self, rows: int) -> int:
        """How many copies load or store so many rows."""
        return 1 if self.group == 1 else rows // self.rows_per_copy

    @property
    def whole(self) -> int:
        """The queries of q, out and dO must be a multiple of this: a copy of one query's heads is not clipped."""
        return max(LEAST_ROWS, self.block_q) if self.by_query else LEAST_ROWS

    # -- inside a kernel: a tile begins at a row and lies in one block -------------------------------------------------

    def first_query(self, row: Any) -> Any:
        if self.group == 1:
            return row
        if self.by_query:
            return lax.div(row, jnp.int32(self.group))
        return lax.div(row, jnp.int32(self.rows)) * self.block_q

    def query(self, number: Any) -> Any:
        """The query of row `number` of a tile, counted from `first_query`."""
        if self.group == 1:
            return number
        if self.by_query:
            return lax.shift_right_logical(number, jnp.full_like(number, self.group.bit_length() - 1))
        return number & (self.block_q - 1)

    def load(self, ref: Any, batch: Any, row: Any, head: Any, tile: Any, barrier: Any) -> None:
        """Starts the copies of a tile from ref [B, T, H, D]; `head` is a K/V head if packed, else a query head."""
        self._copy(ref, batch, row, head, tile, lambda source, part: plgpu.copy_gmem_to_smem(source, part, barrier))

    def store(self, tile: Any, ref: Any, batch: Any, row: Any, head: Any, **how: Any) -> None:
        self._copy(ref, batch, row, head, tile, lambda target, part: plgpu.copy_smem_to_gmem(part, target, **how))

    def _copy(self, ref: Any, batch: Any, row: Any, head: Any, tile: Any, copy: Callable[[Any, Any], None]) -> None:
        rows = tile.shape[0]
        if self.group == 1:
            copy(ref.at[batch, pl.ds(row, rows), head], tile)
            return
        first, heads = self.first_query(row), pl.ds(head * self.group, self.group)
        queries = pl.ds(pl.multiple_of(first, LEAST_ROWS) if not self.by_query else first, self.block_q)
        first_head = head * self.group + lax.div(lax.rem(row, jnp.int32(self.rows)), jnp.int32(self.block_q))

        @pl.loop(0, self.pieces(rows))  # unrolled, the copies would take more registers
        def _part(i: Any) -> None:
            here = pl.ds(pl.multiple_of(i * self.rows_per_copy, LEAST_ROWS), self.rows_per_copy)
            at = (batch, first + i, heads) if self.by_query else (batch, queries, first_head + i)
            copy(ref.at[at], tile.at[here])

    # -- vectors with a number per query, in the order of the rows -----------------------------------------------------

    def of_tokens(self, x: jax.Array) -> jax.Array:
        """[B, T] to [B, rows of all blocks]; T is a multiple of block_q."""
        return (
            x
            if self.group == 1
            else self.of_heads(jnp.broadcast_to(x[:, None], (len(x), self.group, x.shape[1])))[:, 0]
        )

    def of_heads(self, x: jax.Array) -> jax.Array:
        """[B, H, T] to [B, K, rows of all blocks]; T is a multiple of block_q."""
        if self.group == 1:
            return x
        block = 1 if self.by_query else self.block_q
        x = x.reshape(x.shape[0], -1, self.group, x.shape[2] // block, block)
        return x.swapaxes(2, 3).reshape(*x.shape[:2], -1)

    def to_heads(self, x: jax.Array) -> jax.Array:
        """The inverse of `of_heads`."""
        if self.group == 1:
            return x
        block = 1 if self.by_query else self.block_q
        x = x.reshape(*x.shape[:2], -1, self.group, block).swapaxes(2, 3)
        return x.reshape(x.shape[0], -1, x.shape[3] * block)
