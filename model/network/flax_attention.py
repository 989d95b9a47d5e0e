"""Block-sparse attention in a Flax model of your own, as the `attention_fn` of its attention layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import xsake


def attention_fn(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    *,
    input_positions: Array | None = None,
    block_mask: xsake.BlockMask | Callable[[Array, Array], xsake.BlockMask] | None = None,
    implementation: str | None = None,
) -> Array:
    """`xsake.attention` with the signature of Flax's `dot_product_attention`, for nnx and for linen.

    Give this function to a layer as `attention_fn`, with the blocks that the layer's heads attend to:

    >>> from functools import partial
    >>> import jax.numpy as jnp, xsake
    >>> from flax import nnx
    >>> blocks = xsake.patterns.sink_window(256, 256, sink=64, window=64, block_q=64, block_kv=64)
    >>> layer = nnx.MultiHeadAttention(
    ...     num_heads=4, in_features=64, decode=False, rngs=nnx.Rngs(0),
    ...     attention_fn=partial(attention_fn, block_mask=blocks))
    >>> layer(jnp.ones((2, 256, 64))).shape
    (2, 256, 64)

    A block mask carries its own causal rule. Flax's boolean `mask` is honoured too, but is an array [..., T, S]: for
    causality use the block mask or `is_causal`. Products are computed as precisely as any `jax.lax.Precision` asks for.

    A function of the layer's queries and keys chooses the blocks by what the layer reads, as HADS does:
    `block_mask=partial(xsake.hads.select, profile=profile, budget=0.2, layer=3)`. Each layer needs its own number.

    A layer that decodes (`decode=True`) attends with one query to a cache of S keys. Give nnx's layers that query's
    position as `input_positions` [..., 1], and the query attends to the blocks of its row in a block mask of S queries:

    >>> layer.init_cache((2, 256, 64))
    >>> step = nnx.jit(lambda layer, token, at: layer(token, decode=True, input_positions=at))
    >>> step(layer, jnp.ones((2, 1, 64)), jnp.full((2, 1), layer.cache_index[...])).shape
    (2, 1, 64)

    Refused, because attention weights are never formed: dropout of the weights, and storing them (`sow_weights`).
    """
    _refuse(deterministic, dropout_rate, module, precision, qk_attn_weights_einsum, attn_weights_value_einsum)
    lead = query.shape[:-3]  # Flax allows any number of batch dimensions
    if not lead == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            f"query, key and value must have the same batch dims: got shapes {query.shape}, {key.shape}, {value.shape}"
        )
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    query, key, value = (x.astype(dtype) for x in (query, key, value))

    def one_batch(x: Array) -> Array:
        return x.reshape(math.prod(lead), *x.shape[-3:])

    window = positions = None
    if callable(block_mask):
        block_mask = block_mask(one_batch(query), one_batch(key))
    if block_mask is not None and query.shape[-3] == 1 < block_mask.q_len:
        if input_positions is None:
            raise ValueError(
                f"block_mask is for {block_mask.q_len} queries and this call has one, as with decode=True: pass "
                f"the query's position to the layer as input_positions, or a block_mask of q_len=1, or no block_mask"
            )
        at = jnp.broadcast_to(input_positions, (*lead, 1)).reshape(-1, 1)
        positions = at, jnp.arange(block_mask.kv_len)[None]
        is_causal, window = is_causal or block_mask.is_causal, block_mask.local_window_size
        block_mask = _row(block_mask, at)
    elif input_positions is not None:
        raise NotImplementedError(
            "input_positions are for one query that decodes with a block_mask. For rotary embeddings give the layer a "
            "function of your own as attention_fn, which takes input_positions, rotates query and key, and calls "
            "xsake.model.attention_fn"
        )
    if mask is not None:
        # As in jax.nn, a row that is masked everywhere gives all keys the same weight.
        lowest = jnp.asarray(-0.7 * float(jnp.finfo(jnp.float32).max), jnp.float32)
        bias = jnp.zeros((1,) * mask.ndim) if bias is None else bias
        rank = max(mask.ndim, bias.ndim)
        mask, bias = (jax.lax.broadcast_to_rank(x, rank) for x in (mask.astype(bool), bias.astype(jnp.float32)))
        bias = jnp.where(mask, bias, lowest)
    if bias is not None:
        if bias.ndim > 4:
            bias = jnp.broadcast_to(bias, (*lead, *bias.shape[-3:]))
        bias = bias.reshape(-1, *(1,) * (3 - bias.ndim), *bias.shape[-3:])
    out = xsake.attention(
        one_batch(query),
        one_batch(key),
        one_batch(value),
        block_mask,
        bias=bias,
        is_causal=is_causal,
        local_window_size=window,
        positions=positions,
        implementation=implementation,
    )
    return out.reshape(*lead, *out.shape[1:])


def _refuse(deterministic: bool, dropout_rate: float, module: Any, precision: Any, *einsums: Any) -> None:
    """Raise for arguments that cannot be honoured."""
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"dropout_rate must be in the range [0, 1), got {dropout_rate}")
    if dropout_rate > 0 and not deterministic:
        raise NotImplementedError(
            f"{dropout_rate=}: attention weights are never formed, so none can be dropped; use dropout_rate=0 and drop "
            f"the layer's output instead (nnx.Dropout, linen.Dropout), or deterministic=True"
        )
    if module is not None:
        raise NotImplementedError(
            "module (sow_weights=True): attention weights are never formed; to look at them, run the layer with Flax's "
            "own dot_product_attention and mask=block_mask.to_elements()"
        )
    if any(einsum is not None for einsum in einsums):
        raise NotImplementedError(
            "qk_attn_weights_einsum and attn_weights_value_einsum: the kernels compute these products; leave both "
            "None, or use Flax's own dot_product_attention for a quantised einsum"
        )
    for each in precision if isinstance(precision, tuple) else (precision,):
        try:
            jax.lax.Precision(each)  # takes None and the names that JAX gives each precision
        except ValueError:
            raise NotImplementedError(
                f"{precision=} names no jax.lax.Precision: float32 is multiplied at the highest, bfloat16 and "
                f"float16 are summed in float32, and there is no other arithmetic; use None"
            ) from None


def _row(mask: xsake.BlockMask, positions: Array) -> xsake.BlockMask:
    """The blocks of one query per batch entry, at `positions` [B, 1].

    The mask's rule, which applies to indices, is left out: the caller applies it to positions.
    """
    if mask.bitmaps is not None:
        raise NotImplementedError(
            "block_mask has bitmaps, which choose single elements; decoding takes masks of blocks: give the rows of "
            "a cached query as a mask of its own to xsake.attention"
        )
    outside = (positions < 0) | (positions >= mask.q_len)
    if not isinstance(outside, jax.core.Tracer) and outside.any():
        raise ValueError(
            f"input_positions must be in [0, {mask.q_len}), the queries of block_mask; got {positions[:, 0]}"
        )
    rows = jnp.clip(positions // mask.block_q, 0, mask.num_q_blocks - 1)
    batch = len(positions)
    pointers, indices = (
        jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in map(jnp.asarray, (mask.kv_row_ptr, mask.kv_indices))
    )
    first, last = (jnp.take_along_axis(pointers, rows[:, None] + i, axis=-1) for i in (0, 1))  # [B, h, 1]
    slots = first + jnp.arange(mask.num_kv_blocks)[None, None]
    found = jnp.take_along_axis(indices, jnp.minimum(slots, mask.capacity - 1), axis=-1)
    # A traced position out of range cannot raise: a block out of range makes the output NaN, as an overflow does.
    lost = mask.incomplete_heads()
    wrong = outside[:, None] if lost is None else outside[:, None] | lost[..., None]
    blocks = jnp.where(wrong, mask.num_kv_blocks, jnp.where(slots < last, found, -1))
    return xsake.BlockMask.from_indices(
        blocks[:, :, None],
        block_q=mask.block_q,
        block_kv=mask.block_kv,
        q_len=1,
        kv_len=mask.kv_len,
        transpose=mask.has_transpose,
    )
