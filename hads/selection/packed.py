"""Packed: where the documents of a packed sequence begin, so that each chooses among its own blocks, at its own count.

A row of blocks sees keys from the first token on that shares a segment with one of its queries. Rows that begin to see
at the same block are a document's; a row that holds the end of a document and the beginning of another is the former's.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, UInt

from xsake._ground.trace import vary, varying_axes
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.keep import over_shards


class Packed(NamedTuple):
    """For every row of blocks: the first block of its document, and the rows of its document."""

    begin: Int[Array, "B rows"]
    same: Bool[Array, "B rows rows"]
    segments: Int[Array, "B T"]

    @classmethod
    def of(cls, segment_ids: Int[Array, "B T"], grid: CausalGrid) -> Packed:
        """Segments need not rise, nor lie together: all between a segment's first and last token belongs to it."""
        first = jax.vmap(_first_of_segment)(segment_ids)
        rest = grid.rows * grid.block_q - grid.length
        by_row = jnp.pad(first, ((0, 0), (0, rest)), constant_values=grid.length).reshape(len(first), grid.rows, -1)
        begin = by_row.min(-1) // grid.block
        return cls(begin, begin[:, :, None] == begin[:, None], segment_ids)

    def visible(self, grid: CausalGrid) -> Bool[Array, "B 1 rows n"]:
        """The blocks that are not before a row's document."""
        return (jnp.arange(grid.columns, dtype=jnp.int32) >= self.begin[..., None])[:, None]

    def row(self, grid: CausalGrid) -> Int[Array, "B 1 rows 1"]:
        """The number of each row in its document."""
        row = jnp.arange(grid.rows, dtype=jnp.int32)[None] - self.begin // grid.tall
        return row[:, None, :, None]

    def column(self, grid: CausalGrid) -> Int[Array, "B 1 rows n"]:
        """The number of each block in the row's document."""
        return (jnp.arange(grid.columns, dtype=jnp.int32) - self.begin[..., None])[:, None]

    def length(self, grid: CausalGrid) -> Int[Array, "B 1 rows 1"]:
        """How many tokens the rows of each row's document have, up to the end of the last of them."""
        row = jnp.arange(grid.rows, dtype=jnp.int32)
        last = jnp.where(self.same, row, 0).max(-1)
        end = jnp.minimum((last + 1) * grid.block_q, grid.length)
        return (end - self.begin * grid.block)[:, None, :, None]

    def counts(
        self, table: Int[Array, "n_and_one"], there: Int[Array, "n_and_one"], grid: CausalGrid
    ) -> Int[Array, "B rows"]:
        """How many blocks each row's document keeps, over all heads. `table` and `there` are the blocks that sequences
        of 0, 1, ... blocks of keys keep and have."""
        row = jnp.arange(grid.rows, dtype=jnp.int32)
        first = jnp.where(self.same, row, grid.rows).min(-1) - self.begin // grid.tall
        sizes = -(-self.length(grid)[:, 0, :, 0] // grid.block), first * grid.tall
        (most, before), (all_of, others) = ([x[n] for n in sizes] for x in (table, there))
        return jnp.minimum(most - before, all_of - others)


def _first_of_segment(segments: Int[Array, "T"]) -> Int[Array, "T"]:
    """For every token, the first one of its segment."""
    order = jnp.argsort(segments, stable=True).astype(jnp.int32)
    in_order = segments[order]
    begins = jnp.concatenate([jnp.ones(1, bool), in_order[1:] != in_order[:-1]])
    place = jnp.arange(len(order), dtype=jnp.int32)
    first = order[jax.lax.cummax(jnp.where(begins, place, 0))]
    return jnp.zeros_like(order).at[order].set(first)


def packed_row_counts(
    order: UInt[Array, "B H rows w"], count: Int[Array, "B rows"], packed: Packed, axes: tuple[str, ...] = ()
) -> Int[Array, "B H rows"]:
    """`keep.row_counts` with a count for the rows of each document, over the heads of all shards of `axes`."""
    of_document = partial(_over_documents, packed.same)
    digits = jnp.arange(1, 16, dtype=jnp.uint32)[None, None]

    def four_bits(at: Array, cut: Array) -> Array:
        shift = jnp.asarray(28 - 4 * at, jnp.uint32)
        cuts = cut[..., None] + (digits << shift)
        reach = over_shards(axes, of_document((order[..., None] >= cuts[:, None, :, None]).sum((1, 3))))
        return cut + ((reach >= count[..., None]).sum(-1).astype(jnp.uint32) << shift)

    first = vary(jnp.zeros(count.shape, jnp.uint32), varying_axes((order, count)) - set(axes))
    cut = jax.lax.fori_loop(0, 8, four_bits, first)[:, None, :, None]
    reach, above = (order >= cut).sum(-1), (order > cut).sum(-1)
    left = count - over_shards(axes, of_document(above.sum(1)[..., None])[..., 0])
    equal = reach - above
    # Among equal entries later rows come first, and later heads before earlier ones.
    row = jnp.arange(order.shape[2], dtype=jnp.int32)
    after = packed.same & (row > row[:, None])
    later_rows = jnp.moveaxis(_over_documents(after, jnp.moveaxis(equal, 1, 2)), 2, 1)
    of_heads = jnp.moveaxis(of_document(jnp.moveaxis(equal, 1, 2)), 2, 1)
    later_heads = jnp.cumsum(of_heads[:, ::-1], 1)[:, ::-1] - of_heads
    if axes:
        of_shards = jax.lax.all_gather(of_heads.sum(1), axes)
        is_later = jnp.arange(len(of_shards)) > jax.lax.axis_index(axes)
        left = left - jnp.where(is_later[:, None, None], of_shards, 0).sum(0)
    return above + jnp.clip(left[:, None] - later_rows - later_heads, 0, equal)


def _over_documents(same: Bool[Array, "B rows rows"], x: Int[Array, "B rows k"]) -> Int[Array, "B rows k"]:
    """Sums over the rows of each row's document, which are exact: they are below 2 ** 24."""
    wide = jnp.float32
    sums: Float[Array, "B rows k"] = jnp.einsum(
        "bij,bjk->bik", same.astype(wide), x.astype(wide), precision=jax.lax.Precision.HIGHEST
    )
    return sums.astype(jnp.int32)


def segments_of(segment_ids: Any, batch: int, length: int) -> Int[Array, "B T"]:
    """Segment ids as `Packed.of` takes them. ValueError for those of other tokens."""
    if isinstance(segment_ids, tuple):
        raise ValueError("segment_ids of queries and of keys: HADS takes those of a sequence, one array [B, T]")
    ids = jnp.asarray(segment_ids)
    if ids.ndim != 2 or ids.shape[0] not in (1, batch) or ids.shape[1] != length:
        raise ValueError(f"segment_ids of shape {ids.shape} must be [{batch}, {length}], as the tokens are")
    return jnp.broadcast_to(ids, (batch, length))
