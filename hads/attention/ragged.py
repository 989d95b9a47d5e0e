"""HADS for many requests in one array: each request's rows choose among the blocks of its own pages.

The choice is that of `select_chunk`: the rows of a chunk compete for the chunk's count. Here a chunk may begin and end
at any token, unknown while tracing, and lies among others in the one array of `xsake.ragged_attention`.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from xsake._op import ragged
from xsake._op.ragged_batch import Cache
from xsake._op.ragged_layout import Layout
from xsake.hads.attention.policy import Policy, Situation
from xsake.hads.profile.budgets import row_counts
from xsake.hads.profile.by_length import forced_share
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.selection.choice import choose
from xsake.hads.selection.chunk import LayerWeights
from xsake.hads.selection.estimate import layer_mass
from xsake.hads.selection.rows import Rows

DENSE = -1  # the count of a request that attends to all blocks


def counts_of_chunk(
    profile: HadsProfile, budget: float, policy: Policy, *, start: int, end: int, length: int, device: str, dtype: str
) -> Int[np.ndarray, "L"]:
    """How many blocks each layer keeps in the tokens from `start` to `end` of a prompt of `length` tokens, over all its
    heads; `DENSE` where the policy says that dense attention is better.

    The prompt's length decides for all of its chunks. Chunks of whole rows sum to the prompt's counts; a row that two
    chunks share counts in both.
    """
    forced = forced_share(profile.grid(length))
    situation = Situation("request", 1, length, length, float(budget), forced, device, dtype, profile)
    share = policy.decide(situation).budget
    if share is None:
        return np.full(profile.layers, DENSE, np.int32)
    kept = _kept_before(profile, share, length)
    return kept[-(-end // profile.block_q)] - kept[start // profile.block_q]


@lru_cache(maxsize=1024)  # a server asks for every chunk of a prompt
def _kept_before(profile: HadsProfile, share: float, length: int) -> Int[np.ndarray, "rows_and_one L"]:
    """The counts of the first 0, 1, ... rows of a prompt."""
    sums = np.cumsum(row_counts(profile, share, length), 1, dtype=np.int64)
    return np.pad(sums, ((0, 0), (1, 0))).T.astype(np.int32)


def attend(
    profile: HadsProfile,
    layer: int,
    query: Float[Array, "T H D"],
    pages: Any,
    cu_seqlens: Int[Array, "B_and_one"],
    kv_lengths: Int[Array, "B"],
    page_table: Int[Array, "B n"],
    *,
    counts: Int[Array, "B L"],
    lengths: Int[Array, "B"],
    scale: float | None = None,
    **options: Any,
) -> Float[Array, "T H Dv"]:
    """`xsake.ragged_attention` of one layer, each request at its own count (`counts_of_chunk`).

    `lengths` are those of the whole prompts, of which `kv_lengths` may be only a beginning: the last rows of a prompt
    are chosen closely. A layer that HADS leaves alone is dense.
    """
    row = profile.row(layer)
    if row is None:
        return ragged.ragged_attention(query, pages, cu_seqlens, kv_lengths, page_table, scale=scale, **options)
    usual = query.shape[2] ** -0.5
    asking = (
        query if scale is None else (query * (scale / usual)).astype(query.dtype)
    )  # the choice's scale is the usual
    chosen = partial(_chosen, profile, LayerWeights.of(profile, layer), asking, counts[:, row], lengths)
    return ragged.by_blocks(
        query,
        pages,
        cu_seqlens,
        kv_lengths,
        page_table,
        blocks=(profile.block_q, profile.block),
        choose=chosen,
        scale=scale,
        **options,
    )


def _chosen(
    profile: HadsProfile,
    weights: LayerWeights,
    query: Array,
    counts: Array,
    lengths: Array,
    cache: Cache,
    layout: Layout,
) -> Bool[Array, "H R n"]:
    """The blocks that each row of the layout keeps, by the numbers that they have in their request."""
    batch, block_q = layout.batch, layout.block_q
    slots = batch.page_table.shape[1] * cache.page
    grid = CausalGrid(slots, profile.block, profile.rule, profile.window, profile.block_q)
    most = min(grid.rows, max(layout.tokens - 2, 0) // block_q + 2)  # rows of one request
    shape = (query.shape[1], most, grid.columns)
    place = jnp.arange(slots, dtype=jnp.int32)

    def of_request(b: Array) -> Bool[Array, "H rows n"]:
        start, end = batch.starts[b], batch.kv_lengths[b]
        token = jnp.clip(place - start + batch.cu_seqlens[b], 0, layout.tokens - 1)
        asks = (place >= start) & (place < end)
        rows = Rows(grid, 0, lengths[b][None], span=jnp.stack([start, end])[None])
        own = jnp.where(asks[:, None, None], query[token], 0)
        key = jnp.where((place < end)[:, None, None], cache.keys_of(batch.page_table[b]), 0)
        mass = layer_mass(own[None], key[None], weights.estimator, rows)
        rule = {"sensitivity": weights.sensitivity, "burstiness": weights.burstiness}
        blocks = choose(mass, rows, count=counts[b][None, None], **rule)[0]
        first = jnp.minimum(start // block_q, grid.rows - most)
        return jax.lax.dynamic_slice_in_dim(blocks, first, most, 1)

    def or_all(b: Array) -> Bool[Array, "H rows n"]:
        sparse = (counts[b] >= 0) & (batch.queries[b] > 0)
        return jax.lax.cond(sparse, of_request, lambda b: jnp.ones(shape, bool), b)

    found = jax.lax.map(or_all, jnp.arange(batch.requests, dtype=jnp.int32))
    owner, row, _ = layout.of_rows()
    within = row - jnp.minimum(layout.first_row, grid.rows - most)[owner]
    return jnp.moveaxis(found, 2, 1)[owner, jnp.clip(within, 0, most - 1)].swapaxes(0, 1)
