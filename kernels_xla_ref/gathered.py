"""Attention of a few new tokens per sequence to a list of blocks of a cache, which are gathered: no other is read."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

NEG_INF = float("-inf")


def attend_blocks(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K D"],
    kv_head: Int[Array, "B W"],
    block: Int[Array, "B W"],
    live: Bool[Array, "B W"],
    lengths: Int[Array, "B"],
    *,
    block_size: int,
    window: int | None = None,
) -> Float[Array, "B T H D"]:
    """Softmax attention of each sequence's last T tokens to the keys of the listed blocks, each token's own and before.

    `lengths` counts the T tokens. Entries of the list belong to one KV head each; query heads of its group attend to
    the block, for all T tokens. An entry that is not `live` counts for nothing. Partial sums of a head's entries are
    merged by their largest logits. With a `window`, a token sees itself and the `window - 1` tokens before it.
    """
    b, t, h, d = query.shape
    groups = key.shape[2]
    row = jnp.arange(b)[:, None]
    slots = block[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)[None, None]
    places = (lengths - t)[:, None] + jnp.arange(t, dtype=jnp.int32)[None]
    ok = live[:, :, None, None] & (slots[:, :, None] <= places[:, None, :, None])  # [B, W, T, block]
    if window is not None:
        ok &= slots[:, :, None] > places[:, None, :, None] - window
    where = (row[..., None], jnp.minimum(slots, key.shape[1] - 1), kv_head[..., None])
    k, v = key[where].astype(jnp.float32), value[where].astype(jnp.float32)
    q = (query.astype(jnp.float32) * d**-0.5).reshape(b, t, groups, h // groups, d).swapaxes(1, 2)[row, kv_head]
    logits = jnp.einsum("bwtgd,bwsd->bwtgs", q, k, precision=lax.Precision.HIGHEST)
    logits = jnp.where(ok[:, :, :, None], logits, NEG_INF)
    heads = (b, groups, t, h // groups)
    peak = jnp.full(heads, NEG_INF).at[row, kv_head].max(logits.max(-1))
    p = jnp.exp(logits - jnp.where(peak == NEG_INF, 0.0, peak)[row, kv_head][..., None])
    total = jnp.zeros(heads).at[row, kv_head].add(p.sum(-1))
    # What is not attended may hold anything, NaN included; a weight of 0 times NaN would be NaN.
    v = jnp.where(ok.any(2)[..., None], v, 0)
    part = jnp.einsum("bwtgs,bwsd->bwtgd", p, v, precision=lax.Precision.HIGHEST)
    out = jnp.zeros((*heads, d)).at[row, kv_head].add(part) / jnp.where(total == 0, 1.0, total)[..., None]
    return out.swapaxes(1, 2).reshape(b, t, h, d).astype(query.dtype)
