"""Block-sparse attention in a Flax model of your own: one argument of its attention layers."""

from __future__ import annotations

import math
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
    block_mask: xsake.BlockMask | None = None,
    implementation: str | None = None,
) -> Array:
    """`xsake.attention` with the signature of Flax's `dot_product_attention`, for nnx and for linen.

    Give it to a layer as `attention_fn`, with the blocks that its heads attend to:

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
    causality use the block mask or `is_causal`. Dropout of attention weights, other precisions than the highest and the
    weights themselves (`sow_weights`) are refused: the weights never exist.
    """
    if dropout_rate > 0 and not deterministic:
        raise NotImplementedError(f"{dropout_rate=}: attention weights are never formed, so none can be dropped")
    if module is not None:
        raise NotImplementedError("module (sow_weights=True): attention weights are never formed")
    if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
        raise NotImplementedError(
            "qk_attn_weights_einsum and attn_weights_value_einsum: the kernels multiply themselves"
        )
    if precision not in (None, "highest", jax.lax.Precision.HIGHEST):
        raise NotImplementedError(f"{precision=}: float32 is always computed at the highest precision")
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    lead = query.shape[:-3]  # Flax allows any number of batch dimensions

    def one_batch(x: Array) -> Array:
        return x.reshape(math.prod(lead), *x.shape[-3:])

    if mask is not None:
        # As jax.nn does: a row that is masked everywhere attends to everything alike.
        lowest = jnp.asarray(-0.7 * float(jnp.finfo(jnp.float32).max), jnp.float32)
        bias = jnp.where(mask.astype(bool), 0.0 if bias is None else bias.astype(jnp.float32), lowest)
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
        implementation=implementation,
    )
    return out.reshape(*lead, *out.shape[1:])
