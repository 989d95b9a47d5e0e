"""`moba_attention`: mixture of block attention. Every query head chooses for itself, by the mean key of a block."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Int

from xsake._op.shapes import Arrays, Output
from xsake._selection.checks import check_arrays, check_whole
from xsake._selection.choose import choose_blocks, pooled
from xsake._selection.selected import selected_attention
from xsake._selection.sequences import Sequences


def moba_attention(
    query: Float[Arrays, "B T H D"],
    key: Float[Arrays, "B T K D"],
    value: Float[Arrays, "B T K Dv"],
    *,
    block_size: int,
    num_selected: int,
    scale: float | None = None,
    cu_seqlens: Int[Arrays, "sequences_and_one"] | None = None,
    sinks: Float[Arrays, "H"] | Float[Arrays, "H sinks"] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Output:
    """Mixture of block attention (MoBA), causal: one softmax over the blocks that each token and head has chosen.

    A token of a query head attends to its own block and to those `num_selected - 1` earlier blocks whose mean key has
    the largest product with the query. Arguments that are not named here are those of `selected_attention`.

    Args:
      block_size: tokens per block; MoBA's chunk size.
      num_selected: blocks per token, the own block among them; MoBA's top-k.

    >>> import jax, xsake
    >>> q, k = (jax.random.normal(jax.random.key(heads), (1, 256, heads, 32)) for heads in (8, 2))
    >>> xsake.moba_attention(q, k, k, block_size=32, num_selected=3).shape
    (1, 256, 8, 32)
    """
    query, key, value = check_arrays(query, key, value)
    block_size = check_whole("block_size", block_size)
    num_selected = check_whole("num_selected", num_selected)
    batch, tokens = query.shape[:2]
    sequences = None if cu_seqlens is None else Sequences.of(cu_seqlens, batch, tokens, block_size)
    q, k = (query, key) if sequences is None else (sequences.spread(query), sequences.spread(key))
    chosen = choose_blocks(
        q,
        pooled(k, block_size),
        block_size=block_size,
        count=num_selected,
        scale=1.0,
        by_weight=False,
        keep_first=False,
        segment=None if sequences is None else sequences.segment,
    )
    if sequences is not None:
        chosen = sequences.own_blocks(chosen)
    return selected_attention(
        query,
        key,
        value,
        chosen,
        block_size=block_size,
        scale=scale,
        cu_seqlens=cu_seqlens,
        sinks=sinks,
        return_lse=return_lse,
        implementation=implementation,
        config=config,
    )
