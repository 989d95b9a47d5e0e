"""Long columns of keys that several CTAs share: which part a CTA computes, and the sum of the parts in a fixed order.

A pair is a batch entry and a K/V head. Its columns are ranked by length, longest first. The longest columns of every
pair (its first ranks) are early: they run before all other columns, and each is cut into parts. The other columns come
section by section, so that the tiles their CTAs stream share the L2 cache. They come rank by rank (interleaved) where
the long columns of the last section would keep a few SMs busy while the others have nothing left to do.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xsake.kernels_pallas_gpu.hopper.tile.row_lists import RowLists
from xsake.kernels_pallas_gpu.limits import hopper_sms

Array = jax.Array
# A column is long if it takes more than a fifth of an SM's share of the work. Pairs are interleaved where long columns
# are more than a quarter of all work. Random masks have no long columns; masks of vertical lines have few others.
LONG, MANY = 0.2, 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    pairs: int
    section: int  # pairs with interleaved columns: few enough for their streamed tiles to share the L2 cache
    ranks: int  # columns per pair
    early: int = 0  # ranks that come before all sections
    parts: int = 1  # CTAs that share one early column

    @property
    def ctas(self) -> int:
        return self.pairs * (self.early * self.parts + self.ranks - self.early)

    def place(self, item: Any, interleaved: Any = None) -> tuple[Any, Any, Any]:
        """(pair, rank, part) of an item. `interleaved`: the result of the method of that name, or a ref to it."""
        ahead = self.pairs * self.early * self.parts
        number = lax.max(item - ahead, jnp.int32(0))
        rank, pair = in_sections(number, self.pairs, self.section, self.ranks - self.early)
        if interleaved is not None:
            all_pairs = interleaved[0] == 1
            rank = jnp.where(all_pairs, lax.div(number, self.pairs), rank)
            pair = jnp.where(all_pairs, lax.rem(number, self.pairs), pair)
        if not self.early:
            return pair, rank, jnp.int32(0)
        is_early, column = item < ahead, lax.div(item, self.pairs)
        return (
            jnp.where(is_early, lax.rem(item, self.pairs), pair),
            jnp.where(is_early, lax.div(column, self.parts), self.early + rank),
            jnp.where(is_early, lax.rem(column, self.parts), 0),
        )

    def interleaved(self, lists: RowLists, batch: int) -> Array | None:
        """i32[1], 1 if the columns of all pairs are better interleaved; None if one section has them all."""
        if self.section >= self.pairs:
            return None
        blocks = jnp.diff(jnp.minimum(lists.row_ptr, lists.indices.shape[-1]))
        kv_heads = self.pairs // batch
        if blocks.shape[1] > kv_heads:
            blocks = blocks.reshape(blocks.shape[0], kv_heads, -1, blocks.shape[2]).sum(2)
        blocks = jnp.broadcast_to(blocks, (batch, kv_heads, blocks.shape[2])).astype(jnp.float32)
        total = blocks.sum()
        per_block = self.ranks / blocks.shape[2]
        long = jnp.where(blocks > LONG * per_block / hopper_sms() * total, blocks, 0).sum()
        return (long > MANY * total).astype(jnp.int32)[None]

    def room_for_parts(self, keys: int, dim: int) -> jax.ShapeDtypeStruct | None:
        """The array to which the CTAs of early columns, of `keys` keys each, write their parts."""
        shape = (self.pairs, self.early, self.parts, keys, dim)
        return jax.ShapeDtypeStruct(shape, jnp.float32) if self.parts > 1 else None

    def merged(self, whole: Array, parts: Array | None, lists: RowLists, columns_per_block: int) -> Array:
        """Return `whole` [B, S, K, D] with each early column replaced by the sum of its parts, added in their order."""
        if parts is None:
            return whole
        kv_heads, keys = whole.shape[2], parts.shape[3]
        pair, rank = jnp.arange(self.pairs)[:, None], jnp.arange(self.early)[None]
        batch, head = pair // kv_heads, pair % kv_heads
        block = rank // columns_per_block
        if lists.order is not None:
            batches, heads = lists.order.shape[:2]
            block = lists.order[batch if batches > 1 else 0, head * heads // kv_heads, block]
        first = (block * columns_per_block + rank % columns_per_block) * keys
        at = first[:, :, None] + jnp.arange(keys)[None, None]
        total = parts[:, :, 0]
        for part in range(1, self.parts):
            total += parts[:, :, part]
        return whole.at[batch[:, :, None], at, head[:, :, None]].set(total.astype(whole.dtype), mode="drop")


def in_sections(number: Any, pairs: int, section: int, ranks: int) -> tuple[Any, Any]:
    """(rank, pair) of a number: section after section, and inside a section rank after rank."""
    ranks = max(ranks, 1)
    at, rest = lax.div(number, section * ranks), lax.rem(number, section * ranks)
    size = jnp.minimum(section, pairs - at * section)
    return lax.div(rest, size), at * section + lax.rem(rest, size)
