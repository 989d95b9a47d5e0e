"""`native_sparse_attention`: compressed, selected and window attention, and their gated sum."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from xsake._op.attention import attention
from xsake._op.shapes import Arrays
from xsake._selection.checks import check_arrays, check_gate, check_whole
from xsake._selection.choose import choose_blocks, pooled
from xsake._selection.compressed import compressed_attention
from xsake._selection.selected import selected_attention
from xsake._selection.sequences import Sequences


def native_sparse_attention(
    query: Float[Arrays, "B T H D"],
    key: Float[Arrays, "B T K D"],
    value: Float[Arrays, "B T K Dv"],
    *,
    gate_compressed: Float[Arrays, "B T H"] | Float[Arrays, "B T H #Dv"] | None = None,
    gate_selected: Float[Arrays, "B T H"] | Float[Arrays, "B T H #Dv"] | None = None,
    gate_window: Float[Arrays, "B T H"] | Float[Arrays, "B T H #Dv"] | None = None,
    block_size: int = 64,
    num_selected: int = 16,
    window: int | None = None,
    compressed_key: Float[Arrays, "B blocks K D"] | None = None,
    compressed_value: Float[Arrays, "B blocks K Dv"] | None = None,
    block_indices: Int[Arrays, "B T heads n"] | None = None,
    block_counts: int | Int[Arrays, ""] | Int[Arrays, "B T heads"] | None = None,
    cu_seqlens: Int[Arrays, "sequences_and_one"] | None = None,
    keep_first: bool = True,
    scale: float | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "B T H Dv"]:
    """Native sparse attention (NSA), causal: `gate_compressed * c + gate_selected * s + gate_window * w`.

    - c attends to the mean of every block that ends at the token or before; 0 before the end of the first block.
    - s attends to the `num_selected` blocks with the largest weights in c, which the query heads of a K/V head choose
      together; the token's own block always, and with `keep_first` the first block.
    - w attends to the last `window` tokens.

    Args:
      query: [B, T, H, D]; H is a multiple of K.
      key: [B, T, K, D].
      value: [B, T, K, Dv].
      gate_compressed, gate_window: [B, T, H], or per channel [B, T, H, Dv]; None leaves the branch out.
      gate_selected: likewise; None is 1.
      block_size: tokens per block.
      num_selected: blocks per token.
      window: tokens of the window branch; `gate_window` needs it.
      compressed_key, compressed_value: [B, n, K, D] and [B, n, K, Dv] instead of the means: one vector per block, with
        or without that of a last, short block, which no token sees.
      block_indices, block_counts: the choice, instead of the best: as in `selected_attention`. `block_counts` alone
        keeps only so many of the best.
      cu_seqlens: i32[sequences + 1], for B = 1: several sequences, one after the other.
      keep_first: every token selects the first block of its sequence.
      scale: factor of the logits; D ** -0.5 by default.
      implementation: as in `xsake.attention`, for all branches.
      config: for the selected branch.

    The choice itself has no gradient; all else that is floating point does.

    >>> import jax, xsake
    >>> q, k = (jax.random.normal(jax.random.key(heads), (1, 256, heads, 32)) for heads in (8, 2))
    >>> gate = jax.numpy.ones((1, 256, 8))
    >>> xsake.native_sparse_attention(q, k, k, gate_compressed=gate, block_size=32, num_selected=4).shape
    (1, 256, 8, 32)
    """
    query, key, value = check_arrays(query, key, value)
    block_size = check_whole("block_size", block_size)
    num_selected = check_whole("num_selected", num_selected)
    gates = {
        name: check_gate(f"gate_{name}", gate, query, value)
        for name, gate in (("compressed", gate_compressed), ("selected", gate_selected), ("window", gate_window))
    }
    if (gates["window"] is None) != (window is None):
        raise ValueError(
            f"window and gate_window go together; got window={window!r} and gate_window "
            f"{'None' if gate_window is None else 'an array'}"
        )
    if window is not None:
        window = check_whole("window", window)
    if (compressed_key is None) != (compressed_value is None):
        raise ValueError("compressed_key and compressed_value go together: give both, or neither for means")
    batch, tokens, _, dim = query.shape
    factor = dim**-0.5 if scale is None else scale
    options: dict[str, Any] = dict(scale=scale, implementation=implementation)

    sequences = None if cu_seqlens is None else Sequences.of(cu_seqlens, batch, tokens, block_size)
    if sequences is None:
        q, k, v, segment = query, key, value, None
    else:
        q, k, v = (sequences.spread(x) for x in (query, key, value))
        segment = sequences.segment
        if compressed_key is not None:
            raise NotImplementedError(
                "compressed_key and compressed_value with cu_seqlens: blocks of several sequences have no one layout; "
                "leave them out for means, or call once for each sequence"
            )
    if block_indices is None or gates["compressed"] is not None:
        k_blocks, v_blocks = _compressed(compressed_key, compressed_value, k, v, block_size)
    elif compressed_key is not None:
        raise ValueError(
            "compressed_key is given, but nothing uses it: give gate_compressed, or leave out block_indices"
        )

    branch, lse = None, None
    if gates["compressed"] is not None:
        given = dict(block_size=block_size, segment=segment, **options)
        branch, lse = compressed_attention(q, k_blocks, v_blocks, **given)
    if block_indices is None:
        block_indices = choose_blocks(
            q,
            k_blocks,
            block_size=block_size,
            count=num_selected,
            scale=factor,
            by_weight=True,
            keep_first=keep_first,
            segment=segment,
            lse=lse,
        )
        if sequences is not None:
            block_indices = sequences.own_blocks(block_indices)
    out = _gated(
        gates["selected"],
        selected_attention(
            query,
            key,
            value,
            block_indices,
            block_counts,
            block_size=block_size,
            cu_seqlens=cu_seqlens,
            config=config,
            **options,
        ),
    )
    if branch is not None:
        out = out + _gated(gates["compressed"], branch if sequences is None else sequences.gather(branch))
    if window is not None:
        branch = attention(q, k, v, is_causal=True, local_window_size=(window - 1, 0), segment_ids=segment, **options)
        out = out + _gated(gates["window"], branch if sequences is None else sequences.gather(branch))
    return out.astype(query.dtype)


def _gated(gate: Array | None, branch: Array) -> Array:
    wide = branch.astype(np.promote_types(branch.dtype, jnp.float32))
    return wide if gate is None else gate.astype(wide.dtype) * wide


def _compressed(
    compressed_key: Any, compressed_value: Any, key: Array, value: Array, block_size: int
) -> tuple[Array, Array]:
    if compressed_key is None:
        return pooled(key, block_size), pooled(value, block_size)
    complete, most = key.shape[1] // block_size, -(-key.shape[1] // block_size)
    found = []
    for name, given, like in (("compressed_key", compressed_key, key), ("compressed_value", compressed_value, value)):
        given = jnp.asarray(given)
        b, _, k, d = like.shape
        if given.shape not in ((b, complete, k, d), (b, most, k, d)):
            raise ValueError(
                f"{name} must be [batch, blocks, heads, dim]={[b, complete, k, d]}, or have {most} blocks; got shape "
                f"{tuple(given.shape)}"
            )
        if given.dtype != like.dtype:
            raise TypeError(f"{name} must have the dtype of key and value, {like.dtype}; got {given.dtype}")
        found.append(jnp.pad(given, ((0, 0), (0, most - given.shape[1]), (0, 0), (0, 0))))
    return found[0], found[1]
