"""Group packing: the rows of a tile are the same few queries of all the heads that share keys, values and block lists.

A mask whose blocks have 8, 16 or 32 queries would leave most of the 64 rows of a matrix product empty. Packed, a block
of a K/V head has `group * block_q` rows: the queries of its first query head, then those of the second, and so on. To
the kernels it is a call with one query head per K/V head and blocks of so many rows. Nothing is copied in global
memory: the queries of a tile are loaded head by head from where they are, and its output is stored likewise.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # of a matrix product
LEAST_QUERIES = 8  # shared memory is written in tiles of 8 rows


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
        group = num_q_heads // num_kv_heads
        fills = block_q >= LEAST_QUERIES and ROWS % block_q == 0 and group % (ROWS // block_q) == 0
        return cls(group, block_q) if fills and list_heads in (1, num_kv_heads) else None

    @classmethod
    def required(cls, block_q: int, lists: Any, num_q_heads: int, num_kv_heads: int, bias: Any) -> "Packing":
        packing = cls.of(block_q, lists.indices.shape[1], num_q_heads, num_kv_heads)
        if packing is None or (packing.group > 1 and bias is not None):
            raise ValueError(f"{block_q=}: heads cannot be packed into tiles of {ROWS} rows, or there is a bias")
        return packing

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.group * self.block_q

    @property
    def queries(self) -> int:
        """Queries among 64 rows, or any multiple of 64: they repeat from head to head."""
        return min(self.block_q, ROWS) if self.group > 1 else ROWS

    def length(self, q_len: int) -> int:
        """Rows of all blocks, or the queries themselves where nothing is packed."""
        return q_len if self.group == 1 else pl.cdiv(q_len, self.block_q) * self.rows

    def pieces(self, rows: int) -> int:
        """Copies that load or store so many rows."""
        return rows // self.block_q if self.group > 1 else 1

    # -- inside a kernel: a tile begins at a row and lies in one block -------------------------------------------------

    def first_query(self, row: Any) -> Any:
        return row if self.group == 1 else lax.div(row, jnp.int32(self.rows)) * self.block_q

    def query(self, number: Any) -> Any:
        """The number of a row in its tile, as the number of its query behind `first_query`."""
        return number if self.group == 1 else number & (self.block_q - 1)

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
        queries = pl.ds(pl.multiple_of(self.first_query(row), LEAST_QUERIES), self.block_q)
        first = head * self.group + lax.div(lax.rem(row, jnp.int32(self.rows)), jnp.int32(self.block_q))

        @pl.loop(0, rows // self.block_q)  # unrolled, the copies would take more registers
        def _of_head(i: Any) -> None:
            here = pl.ds(pl.multiple_of(i * self.block_q, LEAST_QUERIES), self.block_q)
            copy(ref.at[batch, queries, first + i], tile.at[here])

    # -- vectors with a number per query, in the order of the rows -----------------------------------------------------

    def of_tokens(self, x: jax.Array) -> jax.Array:
        """[B, T] to [B, rows of all blocks]; T is a multiple of block_q."""
        if self.group == 1:
            return x
        x = x.reshape(x.shape[0], -1, 1, self.block_q)
        return jnp.broadcast_to(x, (*x.shape[:2], self.group, self.block_q)).reshape(x.shape[0], -1)

    def of_heads(self, x: jax.Array) -> jax.Array:
        """[B, H, T] to [B, K, rows of all blocks]; T is a multiple of block_q."""
        if self.group == 1:
            return x
        x = x.reshape(x.shape[0], -1, self.group, x.shape[2] // self.block_q, self.block_q)
        return x.swapaxes(2, 3).reshape(*x.shape[:2], -1)

    def to_heads(self, x: jax.Array) -> jax.Array:
        """The inverse of `of_heads`."""
        if self.group == 1:
            return x
        x = x.reshape(*x.shape[:2], -1, self.group, self.block_q).swapaxes(2, 3)
        return x.reshape(x.shape[0], -1, x.shape[3] * self.block_q)
