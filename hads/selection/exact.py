"""The exact attention between blocks, one row of blocks at a time; `with_exact_rows` puts it in the last rows.

The estimate knows a block's queries by their mean. A question at the end of a prompt has a few sharp queries, which
drown in that mean, so that the block with the answer ranks far down. For the last rows the exact masses cost little:
every 128 queries are 256 / T of dense attention's products.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.rows import Rows


def with_exact_rows(
    mass: Float[Array, "B H rows n"], query: Float[Array, "B T H D"], key: Float[Array, "B S K D"], rows: Rows
) -> Float[Array, "B H rows n"]:
    """Estimated masses, with the exact ones (`BlockStatistics.share`) in the rows that `Rows.exact` speaks of.

    Queries are the tokens of `rows`. Keys past the grid's end are not read.
    """
    if not rows.exact:
        return mass
    grid, block_q, kv_heads = rows.grid, rows.grid.block_q, key.shape[2]
    b, _, h, d = query.shape
    key = key[:, : grid.length]
    queries = jnp.pad(query, ((0, 0), (0, rows.number * block_q - query.shape[1]), (0, 0), (0, 0)))
    queries = queries.reshape(b, rows.number, block_q, kv_heads, h // kv_heads, d).transpose(0, 1, 3, 4, 2, 5)
    lengths = jnp.full(b, grid.length, jnp.int32) if rows.lengths is None else rows.lengths
    asking = jnp.stack([jnp.zeros_like(lengths), lengths], 1) if rows.span is None else rows.span
    ends = lengths[:, None] if rows.lengths is None else rows.ends()
    begin = jnp.asarray(rows.begin_of_exact(ends), jnp.int32)
    which = (begin[:, :, None] + jnp.arange(rows.exact, dtype=jnp.int32)[None, None]).reshape(b, -1)

    segments = None if rows.packed is None else rows.packed.segments

    def of_row(row: Int[Array, "B"]) -> Float[Array, "B H n"]:
        q = jax.vmap(lambda queries, at: queries[at])(queries, row - rows.first)

        def statistics(q: Array, key: Array, row: Array, asking: Array, segments: Array | None) -> Any:
            return row_statistics(q[None], key[None], row, grid, asking[1], begin=asking[0], segments=segments)

        _, square = jax.vmap(statistics)(q, key, row, asking, segments)
        root = jnp.sqrt(square).reshape(b, h, grid.columns)
        return root / jnp.maximum(root.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)

    exact = jnp.moveaxis(jax.lax.map(of_row, which.T), 0, 1)
    # The rows of two ends may be the same: so are their masses.
    put = mass.at[jnp.arange(b)[:, None], :, which - rows.first].set(exact)
    return jnp.where(rows.exact_mask(), put, mass)


def row_statistics(
    q: Float[Array, "B K G block_q D"],
    key: Float[Array, "B S K D"],
    i: Array,
    grid: CausalGrid,
    length: Array | int,
    *,
    begin: Array | int = 0,
    segments: Int[Array, "S"] | None = None,
) -> tuple[Float[Array, "B K G n"], Float[Array, "B K G n"]]:
    """The means over row i's queries of the attention that they give to each block, and of its square.

    Only the first `length` tokens exist, and only those from `begin` on ask; the keys are the first S, all that these
    queries see, of their own segments.
    """
    place = i * grid.block_q + jnp.arange(grid.block_q)
    in_row: Bool[Array, "block_q"] = (place >= begin) & (place < length)
    by_block = block_sums(attention_rows(q, key, i, grid, segments), grid)
    by_block = jnp.where(in_row[None, None, None, :, None], by_block, 0)
    queries = jnp.maximum(in_row.sum(), 1).astype(jnp.float32)
    return by_block.sum(-2) / queries, jnp.square(by_block).sum(-2) / queries


def attention_rows(
    q: Float[Array, "B K G block_q D"],
    key: Float[Array, "B S K D"],
    i: Array,
    grid: CausalGrid,
    segments: Int[Array, "S"] | None = None,
) -> Float[Array, "B K G block_q S"]:
    """Causal attention weights of the queries of row i; the keys are the first S, all that these queries see."""
    # Products of 16-bit numbers are exact in float32, whatever the precision.
    highest, wide = jax.lax.Precision.HIGHEST, jnp.float32
    logits = jnp.einsum("bkgtd,bskd->bkgts", q, key, precision=highest, preferred_element_type=wide)
    logits = logits * q.shape[-1] ** -0.5
    back = (i * grid.block_q + jnp.arange(grid.block_q))[:, None] - jnp.arange(key.shape[1])[None]
    seen = back >= 0 if grid.window is None else (back >= 0) & (back < grid.window)
    if grid.window is not None:  # queries past the end of the last block may see nothing: their weights do not count
        seen |= back >= grid.length
    if segments is not None:  # queries past the sequence's end are of none, and see themselves
        place = jnp.minimum(i * grid.block_q + jnp.arange(grid.block_q), len(segments) - 1)
        seen &= segments[place][:, None] == segments[None]
    return jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), -1)


def block_sums(weights: Float[Array, "*lead S"], grid: CausalGrid) -> Float[Array, "*lead n"]:
    """Sums over the keys of each block; 0 for blocks past the first S keys."""
    lead = [(0, 0)] * (weights.ndim - 1)
    blocks = -(-weights.shape[-1] // grid.block)
    padded = jnp.pad(weights, [*lead, (0, blocks * grid.block - weights.shape[-1])])
    sums = padded.reshape(*weights.shape[:-1], blocks, grid.block).sum(-1)
    return jnp.pad(sums, [*lead, (0, grid.columns - blocks)])
