"""Which blocks of keys each query token chooses, from scores against one vector per block.

Queries are scored a few at a time, and only the chosen numbers are kept: no [T, T / block] array of scores is whole in
memory.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from xsake._ground.device import compute_capability
from xsake._ground.explicit import over_explicit_axes
from xsake._ground.trace import interpreting, vary, varying_axes

_SCORES_AT_A_TIME = 2**22  # numbers
_MOST_COLUMNS = 32768  # blocks of which the GPU's kernel takes the best: a row must fit in the registers of 8 warps


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
    lse: Float[Array, "B T H"] | None = None,
) -> Int[Array, "B T heads count"]:
    """The `count` best blocks of each token, the best first, -1 where there are fewer. Nothing of it is differentiated.

    A token chooses among its own block, which is always the first choice, and those before it; `keep_first` makes block
    0 of its sequence the second. `by_weight`: the score is the softmax over the blocks that end at the token or before,
    added up over the query heads of a K/V head, which choose together; `lse` is the logsumexp of that softmax, where it
    is known. Otherwise the score is the logit, and every query head chooses for itself. With `segment` ids, a token
    sees blocks whose first token has the same id.
    """
    n = blocks.shape[1]

    def choose(query: Array, blocks: Array, segment: Array | None, lse: Array | None) -> Array:
        rules = _Rules(n, block_size, keep_first, segment)
        if by_weight and lse is not None and _has_kernel(query):
            from xsake._selection import triton_weights  # a GPU module, which `import xsake` must not bring along

            weights = triton_weights.group_weights(query, blocks, lse, block_size=block_size, scale=scale)
            token = jnp.arange(query.shape[1], dtype=jnp.int32)
            return rules.best(weights[:, :, None], token, segment, count)
        return _in_parts(query, blocks, rules, count, scale, by_weight, segment, lse)

    # Heads that choose together stay together: those of a single K/V head, on every device.
    heads = "" if by_weight and blocks.shape[2] == 1 else "h"
    of_tokens, of_blocks = f"b t {heads}", f"b n {heads}"
    given = (*lax.stop_gradient((query, blocks)), segment, lax.stop_gradient(lse))
    found = over_explicit_axes(choose, given, (of_tokens, of_blocks, "b t", of_tokens), of_tokens)
    assert found.shape[3] == min(count, n)
    return lax.stop_gradient(found.astype(jnp.int32))


def _has_kernel(query: Array) -> bool:
    capability = compute_capability()
    has_gpu = interpreting() or (capability is not None and float(capability) >= 8.0)
    return has_gpu and query.dtype.name in ("bfloat16", "float16", "float32")


class _Rules:
    """Which blocks a token sees, and which it takes whatever the scores are."""

    def __init__(self, n: int, block_size: int, keep_first: bool, segment: Array | None):
        self.n, self.block_size, self.keep_first = n, block_size, keep_first
        self.of_blocks = None if segment is None else segment[:, ::block_size][:, :n]

    def same(self, ids: Array | None) -> Array | None:
        """bool[b, tokens, n]: whether a block begins in the token's sequence; None where there is one sequence."""
        if ids is None or self.of_blocks is None:
            return None
        return (ids[:, :, None] == self.of_blocks[:, None, :]) & (ids >= 0)[:, :, None]

    def complete(self, token: Array, ids: Array | None) -> Array:
        """bool[b | 1, tokens, n]: whether a block ends at the token or before."""
        ends = ((jnp.arange(self.n, dtype=jnp.int32) + 1) * self.block_size)[None] <= token[:, None] + 1
        same = self.same(ids)
        return ends[None] if same is None else ends[None] & same

    def best(self, x: Array, token: Array, ids: Array | None, count: int) -> Array:
        """i32[b, tokens, heads, count] from scores [b, k, heads of k, tokens, n] of blocks that are complete."""
        block = jnp.arange(self.n, dtype=jnp.int32)[None]
        before, own = block * self.block_size <= token[:, None], token[:, None] // self.block_size == block
        first = jnp.broadcast_to(block == 0, own.shape)[None]
        before, same = before[None], self.same(ids)
        if same is not None and self.of_blocks is not None:
            before = before & same
            starts = jnp.diff(self.of_blocks, axis=1, prepend=self.of_blocks[:, :1] - 1) != 0
            first = starts[:, None, :] & before
        own, before, first = (y[:, None, None] for y in (own[None], before, first))
        if self.keep_first:
            x = jnp.where(first, jnp.finfo(x.dtype).max, x)
        x = jnp.where(before, jnp.where(own, jnp.inf, x), -jnp.inf)
        score, number = _top_k(x, min(count, self.n))
        number = jnp.where(score == -jnp.inf, -1, number)
        return number.reshape(x.shape[0], -1, *number.shape[3:]).swapaxes(1, 2)


def _top_k(x: Array, count: int) -> tuple[Array, Array]:
    if _has_kernel(x) and x.dtype == jnp.float32 and x.shape[-1] <= _MOST_COLUMNS:
        from xsake._selection import triton_top_k

        return triton_top_k.top_k(x, count)
    score, number = lax.top_k(x, count)
    return score, number


def _in_parts(
    query: Array,
    blocks: Array,
    rules: _Rules,
    count: int,
    scale: float,
    by_weight: bool,
    segment: Array | None,
    lse: Array | None,
) -> Array:
    """A few tokens at a time, so that their scores fit in a cache."""
    b, t, h, d = query.shape
    n, k = blocks.shape[1:3]
    together = max(1, min(t, _SCORES_AT_A_TIME // max(b * h * n, 1)))
    parts = -(-t // together)
    wide = np.promote_types(query.dtype, jnp.float32)

    def cut(x: Array, fill: int = 0) -> Array:
        """[B, T, ...] to [parts, B, tokens, ...]."""
        x = jnp.pad(x, ((0, 0), (0, parts * together - t), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
        return jnp.moveaxis(x.reshape(b, parts, together, *x.shape[2:]), 1, 0)

    def best(part: dict[str, Array]) -> Array:
        x = jnp.einsum(
            "btkgd,bnkd->bkgtn", part["query"], blocks, preferred_element_type=wide, precision=lax.Precision.HIGHEST
        )
        x = (x * scale).astype(wide)
        if by_weight:
            complete = rules.complete(part["token"], part.get("segment"))[:, None, None]
            total = part.get("lse")
            if total is None:
                x = jnp.where(complete, x, -jnp.inf)
                top = x.max(-1, keepdims=True)
                weight = jnp.exp(x - jnp.where(top == -jnp.inf, 0.0, top))
                total = weight.sum(-1, keepdims=True)
                weight = weight / jnp.where(total == 0, 1.0, total)
            else:
                weight = jnp.where(complete, jnp.exp(x - jnp.moveaxis(total, 1, 3)[..., None]), 0.0)
            x = weight.sum(2, keepdims=True)
        return rules.best(x, part["token"], part.get("segment"), count)

    given = {"query": cut(query.reshape(b, t, k, h // k, d))}
    given["token"] = jnp.arange(parts * together, dtype=jnp.int32).reshape(parts, together)
    if segment is not None:
        given["segment"] = cut(segment, -1)
    if lse is not None:
        given["lse"] = cut(lse.reshape(b, t, k, h // k).astype(wide))
    axes = varying_axes([x for x in (query, blocks, segment, lse) if x is not None])
    found = lax.map(best, vary(given, axes))
    return jnp.moveaxis(found, 0, 1).reshape(b, parts * together, *found.shape[3:])[:, :t]
