"""Which blocks of keys each query token chooses, from scores against one vector per block.

Queries are scored a few at a time, and only the chosen numbers are kept: no [T, T / block] array of scores is whole in
memory.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from xsake._trace import vary, varying_axes

_SCORES_AT_A_TIME = 2**22  # numbers


def pooled(x: Float[Array, "B T K D"], block_size: int) -> Float[Array, "B n K D"]:
    """The mean of each block of tokens, in the dtype of x; of the last, short block the mean of zeros too."""
    b, t, k, d = x.shape
    n = -(-t // block_size)
    padded = jnp.pad(x, ((0, 0), (0, n * block_size - t), (0, 0), (0, 0)))
    wide = np.promote_types(x.dtype, jnp.float32)
    return padded.reshape(b, n, block_size, k, d).mean(2, dtype=wide).astype(x.dtype)


def choose_blocks(
    query: Float[Array, "B T H D"],
    blocks: Float[Array, "B n K D"],
    *,
    block_size: int,
    count: int,
    scale: float,
    by_weight: bool,
    keep_first: bool,
    segment: Int[Array, "B T"] | None = None,
) -> Int[Array, "B T heads count"]:
    """The `count` best blocks of each token, the best first, -1 where there are fewer. Nothing of it is differentiated.

    A token chooses among its own block, which is always the first choice, and those before it; `keep_first` makes block
    0 of its sequence the second. `by_weight`: the score is the softmax over the blocks that end at the token or before,
    added up over the query heads of a K/V head, which choose together. Otherwise the score is the logit, and every
    query head chooses for itself. With `segment` ids, a token sees blocks whose first token has the same id.
    """
    query, blocks = lax.stop_gradient((query, blocks))
    b, t, h, d = query.shape
    n, k = blocks.shape[1:3]
    together = max(1, min(t, _SCORES_AT_A_TIME // max(b * h * n, 1)))
    parts = -(-t // together)
    padding = parts * together - t
    wide = np.promote_types(query.dtype, jnp.float32)
    grouped = jnp.pad(query, ((0, 0), (0, padding), (0, 0), (0, 0))).reshape(b, parts, together, k, h // k, d)
    first_of_block = jnp.arange(n, dtype=jnp.int32) * block_size
    of_blocks = None if segment is None else segment[:, ::block_size][:, :n]
    of_tokens = None
    if segment is not None:
        of_tokens = jnp.pad(segment, ((0, 0), (0, padding)), constant_values=-1).reshape(b, parts, together)

    def best(part: tuple) -> Array:
        q, token, ids = part  # [b, tokens, k, group, d], [tokens], [b, tokens]
        x = jnp.einsum("btkgd,bnkd->bkgtn", q, blocks, preferred_element_type=wide, precision=lax.Precision.HIGHEST)
        x = (x * scale).astype(wide)
        own = token[:, None] // block_size == jnp.arange(n)[None]
        before = first_of_block[None] <= token[:, None]
        complete = first_of_block[None] + block_size <= token[:, None] + 1
        first = jnp.broadcast_to(jnp.arange(n)[None] == 0, own.shape)
        own, before, complete, first = (y[None, None, None] for y in (own, before, complete, first))
        if ids is not None and of_blocks is not None:
            same = (ids[:, :, None] == of_blocks[:, None, :]) & (ids >= 0)[:, :, None]
            before, complete = (y & same[:, None, None] for y in (before, complete))
            starts = jnp.concatenate([jnp.ones_like(of_blocks[:, :1], bool), of_blocks[:, 1:] != of_blocks[:, :-1]], 1)
            first = starts[:, None, None, None] & before
        if by_weight:
            x = jnp.where(complete, x, -jnp.inf)
            top = x.max(-1, keepdims=True)
            weight = jnp.exp(x - jnp.where(top == -jnp.inf, 0.0, top))
            total = weight.sum(-1, keepdims=True)
            x = (weight / jnp.where(total == 0, 1.0, total)).sum(2, keepdims=True)
        if keep_first:
            x = jnp.where(first, jnp.finfo(wide).max, x)
        x = jnp.where(before, jnp.where(own, jnp.inf, x), -jnp.inf)
        score, number = lax.top_k(x, min(count, n))
        number = jnp.where(score == -jnp.inf, -1, number)
        return number.reshape(b, -1, *number.shape[3:]).swapaxes(1, 2)  # [b, tokens, heads, count]

    token = jnp.arange(parts * together, dtype=jnp.int32).reshape(parts, together)
    given: tuple[Any, ...] = (jnp.moveaxis(grouped, 1, 0), token)
    axes = varying_axes((query, blocks) if segment is None else (query, blocks, segment))
    if of_tokens is None:
        found = lax.map(lambda part: best((*part, None)), vary(given, axes))
    else:
        found = lax.map(best, vary((*given, jnp.moveaxis(of_tokens, 1, 0)), axes))
    found = jnp.moveaxis(found, 0, 1).reshape(b, parts * together, *found.shape[3:])[:, :t]
    return jax.lax.stop_gradient(found.astype(jnp.int32))
