"""Group packing by copies: the query heads that share a K/V head and the mask become rows of taller blocks.

A block of few queries makes products of few rows. Packed, a block of a K/V head has the queries of its first query
head, then those of the second, and so on; the call has one query head per K/V head. Hopper's kernels pack without
copies (`kernels_pallas_gpu.hopper.tile.packing`), the TPU's by their `fold`.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from xsake.backend.contract import Call, shapes_of

_WORD = 32  # rows in a word of a bitmap
ENOUGH_ROWS = 64  # blocks with so many queries are tall enough


class PackedHeads:
    """`call` is what a backend runs in place of the given call; sinks are added to its results afterwards."""

    def __init__(self, given: Call):
        self.given, self.group, self.block = given, given.q_heads // given.kv_heads, given.mask.block_q
        self.blocks = given.mask.num_q_blocks
        mask = dataclasses.replace(
            given.mask,
            block_q=self.group * self.block,
            q_len=self.blocks * self.group * self.block,
            bitmaps=None if given.mask.bitmaps is None else self._bitmaps(),
        )
        self.call = given.in_rows(self.rows(given.query), mask, self._tokens)

    @classmethod
    def of(cls, call: Call) -> PackedHeads | None:
        """None where there is nothing to pack."""
        return cls(call) if packs(call) else None

    def rows(self, x: Float[Array, "B T H D"], fill: float = 0.0) -> Float[Array, "B R K D"]:
        """`fill` is for the queries that the last block lacks."""
        b, t, h, d = x.shape
        x = jnp.pad(x, ((0, 0), (0, self.blocks * self.block - t), (0, 0), (0, 0)), constant_values=fill)
        x = x.reshape(b, self.blocks, self.block, h // self.group, self.group, d)
        return jnp.transpose(x, (0, 1, 4, 2, 3, 5)).reshape(b, -1, h // self.group, d)

    def of_rows(self, x: Float[Array, "B R K D"]) -> Float[Array, "B T H D"]:
        b, _, k, d = x.shape
        x = x.reshape(b, self.blocks, self.group, self.block, k, d)
        x = jnp.transpose(x, (0, 1, 3, 4, 2, 5)).reshape(b, self.blocks * self.block, k * self.group, d)
        return x[:, : self.given.q_len]

    def statistics(
        self, lse: Float[Array, "B H T"], delta: Float[Array, "B H T"]
    ) -> tuple[Float[Array, "B K R"], Float[Array, "B K R"]]:
        """What the backward of `call` takes for them: a query that does not exist attends nothing."""
        given = ((lse, -jnp.inf), (delta, 0.0))
        lse, delta = (self.rows(x.swapaxes(1, 2)[..., None], fill)[..., 0].swapaxes(1, 2) for x, fill in given)
        return lse, delta

    def results(
        self, out: Float[Array, "B R K Dv"], lse: Float[Array, "B K R"]
    ) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
        """The results of the given call from those of `call`."""
        out, lse = self.of_rows(out), self.of_rows(lse.swapaxes(1, 2)[..., None])[..., 0].swapaxes(1, 2)
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


def packs(call: Call) -> bool:
    """Whether the call's heads can be packed, and the blocks are so small that it pays."""
    mask, group = call.mask, call.q_heads // call.kv_heads
    small = mask.block_q < ENOUGH_ROWS and _WORD % mask.block_q == 0
    return small and group > 1 and mask.heads in (1, call.kv_heads) and call.bias is None


def packed_shapes(call: Call) -> Call:
    """The shapes of the call that a backend runs."""
    return shapes_of(lambda call: PackedHeads(call).call, call) if packs(call) else call
