"""Group packing by copies: the query heads that share a K/V head and the mask become rows of taller blocks.

A block of few queries makes products of few rows. Packed, a block of a K/V head has the queries of its first query
head, then those of the second, and so on; the call has one query head per K/V head. Hopper's kernels pack without
copies (`kernels_pallas_gpu.hopper.tile.packing`), the TPU's by their `fold`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from xsake._rewrites.rewrite import Rewrite
from xsake._rewrites.rows import in_rows
from xsake.backend.contract import Call

_WORD = 32  # rows in a word of a bitmap
ENOUGH_ROWS = 64  # blocks with so many queries are tall enough


class PackedHeads(Rewrite):
    """Sinks are added to the results."""

    def __init__(self, given: Call) -> None:
        super().__init__(given)
        self.group, self.block = given.q_heads // given.kv_heads, given.mask.block_q
        self.blocks = given.mask.num_q_blocks

    @classmethod
    def of(cls, call: Call) -> PackedHeads | None:
        """None where heads cannot be packed, or where blocks are so tall that it would not pay."""
        mask, group = call.mask, call.q_heads // call.kv_heads
        small = mask.block_q < ENOUGH_ROWS and _WORD % mask.block_q == 0
        packs = small and group > 1 and mask.heads in (1, call.kv_heads) and call.bias is None
        return cls(call) if packs else None

    @property
    def call(self) -> Call:
        given = self.given
        mask = dataclasses.replace(
            given.mask,
            block_q=self.group * self.block,
            q_len=self.blocks * self.group * self.block,
            bitmaps=None if given.mask.bitmaps is None else self._bitmaps(),
        )
        return in_rows(given, self._rows(given.query), mask, self._tokens)

    def _rows(self, x: Float[Array, "B T H D"], fill: float = 0.0) -> Float[Array, "B R K D"]:
        """`fill` is for the queries that the last block lacks."""
        b, t, h, d = x.shape
        x = jnp.pad(x, ((0, 0), (0, self.blocks * self.block - t), (0, 0), (0, 0)), constant_values=fill)
        x = x.reshape(b, self.blocks, self.block, h // self.group, self.group, d)
        return jnp.transpose(x, (0, 1, 4, 2, 3, 5)).reshape(b, -1, h // self.group, d)

    def _of_rows(self, x: Float[Array, "B R K D"]) -> Float[Array, "B T H D"]:
        b, _, k, d = x.shape
        x = x.reshape(b, self.blocks, self.group, self.block, k, d)
        x = jnp.transpose(x, (0, 1, 3, 4, 2, 5)).reshape(b, self.blocks * self.block, k * self.group, d)
        return x[:, : self.given.q_len]

    def statistics(self, lse: Array, delta: Any, d_out: Array) -> tuple[Array, Array, Array]:
        """A query that does not exist attends nothing."""
        given = ((lse, -jnp.inf), (delta, 0.0))
        lse, delta = (self._rows(x.swapaxes(1, 2)[..., None], fill)[..., 0].swapaxes(1, 2) for x, fill in given)
        return lse, delta, self._rows(d_out)

    def gradients(self, d_query: Array, d_key: Array, d_value: Array) -> tuple[Array, Array, Array]:
        return self._of_rows(d_query), d_key, d_value

    def results(
        self, out: Float[Array, "B R K Dv"], lse: Float[Array, "B K R"]
    ) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
        out, lse = self._of_rows(out), self._of_rows(lse.swapaxes(1, 2)[..., None])[..., 0].swapaxes(1, 2)
        if self.given.sink_lse is None:
            return out, lse
        sink = self.given.sink_lse.astype(lse.dtype)[:, :, None]
        both = jnp.logaddexp(lse, sink)
        share = jnp.where(lse == -jnp.inf, jnp.where(jnp.isnan(sink), jnp.nan, 0.0), jnp.exp(lse - both))
        return (out.astype(share.dtype) * share.swapaxes(1, 2)[..., None]).astype(out.dtype), both

    def _tokens(self, x: Int[Array, "B T"]) -> Int[Array, "B R"]:
        b, t = x.shape
        x = jnp.pad(x, ((0, 0), (0, self.blocks * self.block - t))).reshape(b, self.blocks, 1, self.block)
        return jnp.broadcast_to(x, (b, self.blocks, self.group, self.block)).reshape(b, -1)

    def _bitmaps(self) -> Array:
        """The words of a block, repeated from head to head."""
        words = jnp.asarray(self.given.mask.bitmaps)[..., 0]
        own = words & np.uint32((1 << self.block) - 1)  # those of queries past the block may be anything
        word = own
        for first in range(self.block, min(_WORD, self.group * self.block), self.block):
            word = word | (own << np.uint32(first))
        return jnp.repeat(word[..., None], -(-self.group * self.block // _WORD), axis=-1)
