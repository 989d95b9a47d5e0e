"""Attention of many requests whose tokens follow one another in one array, each to pages of its own.

To a backend, a ragged batch is one sequence. Its queries are rows of blocks, each of which holds tokens of one request
only; its keys are the pages of all requests, one request after the other. The lists of a row name blocks of its own
request alone, so that nothing of another request is visited, and no block past the request's end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from xsake._ground.device import platform_of
from xsake._ground.explicit import placed_like
from xsake._ground.trace import known_flag
from xsake._op import paged, registry
from xsake._op.arguments import build_call
from xsake._op.ragged_batch import Batch, Cache
from xsake._op.ragged_layout import Layout
from xsake._rewrites.few_queries import MOST_QUERIES
from xsake.hads.mask.band import Band
from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.mask.grid import Window

Arrays = Array | np.ndarray
Choice = Callable[[Cache, Layout], Any]  # the blocks of `Layout.chosen`


def ragged_attention(
    query: Float[Arrays, "T H D"],
    pages: Float[Arrays, "P page *heads_and_dim"] | tuple[Float[Arrays, "P page K D"], Float[Arrays, "P page K Dv"]],
    cu_seqlens: Int[Arrays, "B_and_one"],
    kv_lengths: Int[Arrays, "B"],
    page_table: Int[Arrays, "B n"],
    *,
    scale: float | None = None,
    is_causal: bool = True,
    local_window_size: Window = None,
    sinks: Float[Arrays, "H"] | Float[Arrays, "H sinks"] | None = None,
    logits_soft_cap: float | None = None,
    most_queries: int | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Any:
    """Attention of the tokens of many requests, in one array, to a cache in pages. Forward only.

    Request b has the queries from `cu_seqlens[b]` to `cu_seqlens[b + 1]`. They are the last of its `kv_lengths[b]`
    tokens, whose keys and values are in the cache already: a whole prompt, a chunk of one, or a new token, all in one
    call. A request without queries, and queries from `cu_seqlens[-1]` on, are padding: their output is 0.

    Args:
      query: [T, H, D].
      pages: a pair (key, value) of [P, page, K, D] and [P, page, K, Dv]; or one array of both, [P, page, 2 K, D_pages]
        or [P, page, 2 K / packing, packing, D_pages], whose heads are keys and values by turns (K0, V0, K1, V1, ...)
        and whose last dimension may be longer than D, filled up with 0. It is read in place.
      cu_seqlens: i32[B + 1], rising from 0.
      kv_lengths: i32[B], new tokens included.
      page_table: i32[B, n]: page `page_table[b, i]` holds tokens from i * page on of request b. Entries at or past its
        length may be anything. Requests may share pages: a reused prefix.
      scale, sinks, logits_soft_cap, return_lse, implementation, config: as in `xsake.attention`; the lse is
        float32[T, H].
      is_causal, local_window_size: as in `xsake.attention`, between positions in the request.
      most_queries: no request has more queries, where that is known. Up to 8 run as decoding does, all requests side by
        side; a request with more is NaN then.

    Raises ValueError for numbers that fall or do not fit query, cache or each other, and for pages that do not exist.
    Where the numbers are traced, requests that are wrong are NaN, and all requests where `cu_seqlens` are wrong.

    >>> import jax, jax.numpy as jnp, xsake
    >>> query, cache = jnp.ones((8, 4, 64)), jnp.ones((3, 16, 4, 64))  # 2 K/V heads: K0, V0, K1, V1
    >>> table = jnp.array([[2, 0], [1, -1]])
    >>> jax.jit(xsake.ragged_attention)(query, cache, jnp.array([0, 5, 6]), jnp.array([20, 7]), table).shape
    (8, 4, 64)
    """
    return by_blocks(
        query,
        pages,
        cu_seqlens,
        kv_lengths,
        page_table,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        sinks=sinks,
        logits_soft_cap=logits_soft_cap,
        most_queries=most_queries,
        return_lse=return_lse,
        implementation=implementation,
        config=config,
    )


def by_blocks(
    query: Any,
    pages: Any,
    cu_seqlens: Any,
    kv_lengths: Any,
    page_table: Any,
    *,
    blocks: tuple[int, int] | None = None,
    choose: Choice | None = None,
    scale: float | None = None,
    is_causal: bool = True,
    local_window_size: Window = None,
    sinks: Any = None,
    most_queries: int | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    config: Any = None,
    **others: Any,
) -> Any:
    """`ragged_attention`, whose rows of blocks are of this size and attend to the blocks of `choose`."""
    return_lse = known_flag("return_lse", return_lse)
    floats = paged.forward_only(jax.tree.map(jnp.asarray, {"query": query, "pages": pages, "sinks": sinks}))
    q = floats["query"]
    cache = Cache.of(floats["pages"], q)
    batch = Batch.of(q, cache, cu_seqlens, kv_lengths, page_table)
    if most_queries is not None and (isinstance(most_queries, bool) or not isinstance(most_queries, int)):
        raise TypeError(f"{most_queries=} must be an int that is known while tracing, or None")
    if most_queries is not None and most_queries < 1:
        raise ValueError(f"{most_queries=} must be at least 1")
    options: dict[str, Any] = dict(
        others,
        scale=q.shape[2] ** -0.5 if scale is None else scale,
        is_causal=known_flag("is_causal", is_causal),
        local_window_size=local_window_size,
        sinks=floats["sinks"],
    )
    where: dict[str, Any] = dict(implementation=implementation, config=config)
    if choose is None and most_queries is not None and most_queries <= MOST_QUERIES:
        out, lse = _decode(q, cache, batch, most_queries, where, options)
    else:
        out, lse = _attend(q, cache, batch, where, options, blocks, choose)
    out, lse = placed_like(q, out), placed_like(q, lse)
    return (out, lse) if return_lse else out


# -- prompts and chunks: rows of blocks -------------------------------------------------------------------------------


def _attend(
    query: Array,
    cache: Cache,
    batch: Batch,
    where: dict[str, Any],
    options: dict[str, Any],
    blocks: tuple[int, int] | None,
    choose: Choice | None,
) -> tuple[Array, Array]:
    """(output [T, H, Dv], lse [T, H])"""
    names = registry.candidates(where["implementation"], platform_of(query))
    tokens, page = query.shape[0], cache.page
    if blocks is None:
        slots = batch.page_table.shape[1] * page
        blocks = paged.blocks_in_pages(names[0], tokens, slots, cache.key.shape[3], page)
    layout = Layout(batch, tokens, *blocks, page)
    band = Band.of(options["is_causal"], options["local_window_size"])
    token, position, there = layout.places()
    owner = layout.of_rows()[0]
    slot = jnp.arange(layout.stride, dtype=jnp.int32)[None]
    held = jnp.where(slot < batch.kv_lengths[:, None], jnp.arange(batch.requests, dtype=jnp.int32)[:, None], -2)
    call = build_call(
        cache.padded(query)[token.reshape(1, -1)],
        cache.key,
        cache.value,
        layout.dense(band) if choose is None else layout.chosen(choose(cache, layout), band),
        default_blocks=blocks,
        page_table=layout.table,
        joined_kv=cache.joined_kv,
        segment_ids=(jnp.where(there, owner[:, None], -1).reshape(1, -1), held.reshape(1, -1)),
        positions=(position.reshape(1, -1), jnp.broadcast_to(slot, held.shape).reshape(1, -1)),
        **options,
    )
    call = dataclasses.replace(call, full_is_known=True)
    out, lse = paged.run(names, where["config"], call)
    place = layout.slots()
    return batch.finished(out[0, place, :, : cache.value_dim], lse[0].T[place])


# -- new tokens: requests side by side --------------------------------------------------------------------------------


def _decode(
    query: Array, cache: Cache, batch: Batch, most: int, where: dict[str, Any], options: dict[str, Any]
) -> tuple[Array, Array]:
    names = registry.candidates(where["implementation"], platform_of(query))
    tokens, page, slots = query.shape[0], cache.page, batch.page_table.shape[1] * cache.page
    number = jnp.arange(most, dtype=jnp.int32)[None]
    token = jnp.clip(batch.cu_seqlens[:-1, None] + number, 0, tokens - 1)
    there = number < batch.queries[:, None]
    positions = batch.starts[:, None] + number
    call = build_call(
        cache.padded(query)[token],
        cache.key,
        cache.value,
        None,
        default_blocks=paged.blocks_in_pages(names[0], most, slots, cache.key.shape[3], page),
        page_table=batch.page_table,
        joined_kv=cache.joined_kv,
        segment_ids=(jnp.where(there, 0, -1), jnp.zeros((batch.requests, slots), jnp.int32)),
        positions=(positions, jnp.arange(slots, dtype=jnp.int32)[None]),
        key_value_seq_lengths=jnp.where(batch.queries > 0, batch.kv_lengths, 0),
        **options,
    )
    call = dataclasses.replace(call, mask=_held(batch, call.mask, call.band.left))
    out, lse = paged.run(names, where["config"], call)
    owner, index = batch.owners(tokens), jnp.arange(tokens, dtype=jnp.int32)
    within = index - batch.cu_seqlens[owner]
    place = jnp.clip(within, 0, most - 1)
    too_many = batch.queries > most
    batch = batch._replace(wrong=too_many if batch.wrong is None else batch.wrong | too_many)
    return batch.finished(out[owner, place, :, : cache.value_dim], lse[owner, :, place])


def _held(batch: Batch, mask: BlockMask, left: int | None) -> BlockMask:
    """The one row of the mask, for each request the blocks that hold its tokens and that its window reaches."""
    first = jnp.zeros_like(batch.starts) if left is None else jnp.maximum(batch.starts - left, 0) // mask.block_kv
    end = jnp.where(batch.queries > 0, -(-batch.kv_lengths // mask.block_kv), 0)
    number = jnp.clip(end - first, 0, mask.num_kv_blocks)
    listed = first[:, None] + jnp.arange(mask.num_kv_blocks, dtype=jnp.int32)[None]
    return dataclasses.replace(
        mask,
        kv_indices=jnp.clip(listed, 0, jnp.maximum(end - 1, 0)[:, None])[:, None],
        kv_row_ptr=jnp.stack([jnp.zeros_like(number), number], 1)[:, None],
        kv_num_full=jnp.zeros((batch.requests, 1, 1), jnp.int32),  # with segments, every block is tested
        q_indices=None,
        q_row_ptr=None,
        q_num_full=None,
        row_order=None,
        col_order=None,
    )
