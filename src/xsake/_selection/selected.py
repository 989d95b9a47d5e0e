"""`selected_attention`: every query token attends to the blocks of keys that it names."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Float, Int

from xsake._ground.explicit import over_explicit_axes
from xsake._ground.trace import known_flag
from xsake._op.attention import attention
from xsake._op.shapes import Arrays, Output
from xsake._selection.checks import check_arrays, check_whole
from xsake._selection.sequences import Sequences
from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.mask.token_selection import numbers_that_count, with_window

_ROWS = 64  # of a matrix product


def selected_attention(
    query: Float[Arrays, "B T H D"],
    key: Float[Arrays, "B T K D"],
    value: Float[Arrays, "B T K Dv"],
    block_indices: Int[Arrays, "B T heads n"],
    block_counts: int | Int[Arrays, ""] | Int[Arrays, "B T heads"] | None = None,
    *,
    block_size: int = 64,
    window: int | None = None,
    scale: float | None = None,
    cu_seqlens: Int[Arrays, "sequences_and_one"] | None = None,
    sinks: Float[Arrays, "H"] | Float[Arrays, "H sinks"] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Output:
    """Causal attention of every query token to the blocks of keys that it has chosen.

    A token that attends nothing gives 0 (and lse -inf). Block numbers out of range, of a sequence of its own for
    each token with `cu_seqlens`, raise ValueError when concrete and give NaN when traced, and so do wrong `cu_seqlens`.

    Args:
      query: [B, T, H, D]; H is a multiple of K.
      key: [B, T, K, D].
      value: [B, T, K, Dv].
      block_indices: i32[B, T, K, n] (or 1 or H heads): block j is the keys from j * block_size on. -1 is no block; a
        number that is repeated counts once.
      block_counts: an int or i32[B, T, K]: only the first so many numbers of a token count. None: all.
      block_size: keys per block.
      window: the last so many keys, the token's own included, attend whatever is chosen. None: only what is chosen.
      scale: factor of the logits; D ** -0.5 by default.
      cu_seqlens: i32[sequences + 1], for B = 1: where each sequence begins, and where the last one ends. Block numbers
        are those of the token's own sequence.
      sinks, return_lse, implementation, config: as in `xsake.attention`.

    Returns:
      [B, T, H, Dv] in the query's dtype, or (output, lse float32[B, T, H]).

    >>> import jax, xsake
    >>> q, k = (jax.random.normal(jax.random.key(heads), (1, 256, heads, 32)) for heads in (8, 2))
    >>> own_and_first = jax.numpy.stack([jax.numpy.arange(256) // 64, jax.numpy.zeros(256, int)], -1)[None, :, None]
    >>> xsake.selected_attention(q, k, k, own_and_first, block_size=64).shape
    (1, 256, 8, 32)
    """
    query, key, value = check_arrays(query, key, value)
    block_size = check_whole("block_size", block_size)
    if window is not None:
        window = check_whole("window", window)
    indices = block_indices if hasattr(block_indices, "dtype") else jnp.asarray(block_indices)
    batch, tokens, num_q_heads, _ = query.shape
    num_kv_heads = key.shape[2]
    if indices.ndim != 4 or indices.shape[:2] != (batch, tokens):
        raise ValueError(
            f"block_indices must be [batch, tokens, heads, blocks] with {batch=} and {tokens=}; got shape "
            f"{tuple(indices.shape)}"
        )
    if indices.shape[2] not in (1, num_kv_heads, num_q_heads):
        raise ValueError(f"block_indices has {indices.shape[2]} heads; it must be 1, {num_kv_heads=} or {num_q_heads=}")
    group = num_q_heads // max(num_kv_heads, indices.shape[2])  # heads that choose together
    options: dict[str, Any] = dict(
        scale=scale, sinks=sinks, return_lse=return_lse, implementation=implementation, config=config
    )
    if cu_seqlens is None:
        mask = mask_of(indices, block_counts, tokens, block_size, window, group)
        return attention(query, key, value, mask, **options)
    sequences = Sequences.of(cu_seqlens, batch, tokens, block_size)
    numbers = sequences.blocks(numbers_that_count(indices, block_counts, tokens))
    query, key, value = (sequences.spread(x) for x in (query, key, value))
    mask = mask_of(numbers, None, sequences.length, block_size, window, group)
    # No number is of another sequence's block, but a window reaches back into the sequence before.
    segments = sequences.segment if window is not None else None
    results = attention(query, key, value, mask, segment_ids=segments, **options)
    if known_flag("return_lse", return_lse):
        out, lse = results
        inside = (sequences.place < sequences.length)[None, :, None]
        return sequences.gather(out), jnp.where(inside, sequences.gather(lse), -jnp.inf)
    return sequences.gather(results)


# Query tokens per list: the fewest that fill a matrix product together with the heads of their group, which share the
# list. Neighbours choose alike, and the union of few tokens stays small.
def mask_of(indices: Any, counts: Any, tokens: int, block_size: int, window: int | None, group: int) -> BlockMask:
    block_q = next(n for n in (8, 16, 32, _ROWS) if group % (_ROWS // n) == 0)
    if window is None:
        return BlockMask.from_token_indices(indices, counts, block_kv=block_size, block_q=block_q, is_causal=True)

    def made(numbers: Any) -> BlockMask:
        return BlockMask.of(with_window(numbers, window, block_kv=block_size, block_q=block_q))

    return over_explicit_axes(made, (numbers_that_count(indices, counts, tokens),), ("b t h",), "b h")
