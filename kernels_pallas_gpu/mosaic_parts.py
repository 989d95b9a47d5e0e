"""Long columns of keys that several CTAs share: which part a CTA computes, and the sum of the parts in a fixed order.

A pair is a batch entry and a K/V head. Its columns are ranked by length, longest first. The first ranks of all pairs
are early: they come before all other columns, cut into parts.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xsake.kernels_pallas_gpu.mosaic_common import RowLists

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    pairs: int
    section: int  # pairs with interleaved columns: few enough for what they stream to share the L2 cache
    ranks: int  # columns per pair
    early: int = 0  # ranks that come before all sections
    parts: int = 1  # CTAs that share one early column

    @property
    def ctas(self) -> int:
        return self.pairs * (self.early * self.parts + self.ranks - self.early)

    def place(self, cta: Any) -> tuple[Any, Any, Any]:
        """(pair, rank, part) of a CTA."""
        ahead = self.pairs * self.early * self.parts
        rank, pair = in_sections(lax.max(cta - ahead, jnp.int32(0)), self.pairs, self.section, self.ranks - self.early)
        if not self.early:
            return pair, rank, jnp.int32(0)
        is_early, column = cta < ahead, lax.div(cta, self.pairs)
        return (
            jnp.where(is_early, lax.rem(cta, self.pairs), pair),
            jnp.where(is_early, lax.div(column, self.parts), self.early + rank),
            jnp.where(is_early, lax.rem(column, self.parts), 0),
        )

    def room_for_parts(self, keys: int, dim: int) -> jax.ShapeDtypeStruct | None:
        """Where the CTAs of early columns, of so many keys each, write their parts."""
        shape = (self.pairs, self.early, self.parts, keys, dim)
        return jax.ShapeDtypeStruct(shape, jnp.float32) if self.parts > 1 else None

    def merged(self, whole: Array, parts: Array | None, lists: RowLists, columns_per_block: int) -> Array:
        """`whole` [B, S, K, D], in which each early column is the sum of its parts, in the order of the parts."""
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
