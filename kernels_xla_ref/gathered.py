"""Attention of one token per sequence to a list of blocks of a cache, which are gathered: no other block is read."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

NEG_INF = float("-inf")


def attend_blocks(
    query: Float[Array, "B one H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K D"],
    kv_head: Int[Array, "B W"],
    block: Int[Array, "B W"],
    live: Bool[Array, "B W"],
    lengths: Int[Array, "B"],
    *,
    block_size: int,
) -> Float[Array, "B one H D"]:
    """Softmax attention over the keys of the listed blocks that are below the sequence's length.

    Entries of the list belong to one KV head each; query heads of its group attend to the block. An entry that is not
    `live` counts for nothing. Partial sums of a head's entries are merged by their largest logits.
    """
    b, _, h, d = query.shape
    groups = key.shape[2]
    row = jnp.arange(b)[:, None]
    slots = block[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)
    ok = live[..., None] & (slots < lengths[:, None, None])
    where = (row[..., None], jnp.minimum(slots, key.shape[1] - 1), kv_head[..., None])
    k, v = key[where].astype(jnp.float32), value[where].astype(jnp.float32)
    q = (query[:, 0].astype(jnp.float32) * d**-0.5).reshape(b, groups, h // groups, d)[row, kv_head]
    logits = jnp.einsum("bwgd,bwsd->bwgs", q, k, precision=lax.Precision.HIGHEST)
    logits = jnp.where(ok[:, :, None], logits, NEG_INF)
    heads = (b, groups, h // groups)
    peak = jnp.full(heads, NEG_INF).at[row, kv_head].max(logits.max(-1))
    p = jnp.exp(logits - jnp.where(peak == NEG_INF, 0.0, peak)[row, kv_head][..., None])
    total = jnp.zeros(heads).at[row, kv_head].add(p.sum(-1))
    # What is not attended may hold anything, NaN included; a weight of 0 times NaN would be NaN.
    v = jnp.where(ok[..., None], v, 0)
    part = jnp.einsum("bwgs,bwsd->bwgd", p, v, precision=lax.Precision.HIGHEST)
    out = jnp.zeros((*heads, d)).at[row, kv_head].add(part) / jnp.where(total == 0, 1.0, total)[..., None]
    return out.reshape(b, 1, h, d).astype(query.dtype)
