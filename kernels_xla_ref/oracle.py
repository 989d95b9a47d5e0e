"""Dense attention with every argument of `xsake.attention`: the meaning of the operation, written to be read.

It builds whole [B, H, T, S] arrays, computes in float32 (float64 for float64 inputs) at highest precision and is
differentiated by JAX. Nothing here is shared with the code that it checks.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake.hads.mask.block_mask import BlockMask


def attention(
    query: Array,
    key: Array,
    value: Array,
    mask: BlockMask | None = None,
    *,
    bias: Array | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None,
    positions: Array | tuple[Array, Array] | None = None,
    sinks: Array | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    _, t, h, d = query.shape
    _, s, k_heads, _ = key.shape
    dtype = np.promote_types(query.dtype, jnp.float32)
    q = query.astype(dtype)
    k = jnp.repeat(key.astype(dtype), h // k_heads, axis=2)
    v = jnp.repeat(value.astype(dtype), h // k_heads, axis=2)

    logits = jnp.einsum("bthd,bshd->bhts", q, k, precision=lax.Precision.HIGHEST)
    logits = logits * (d**-0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + bias.astype(dtype)
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)

    q_index, k_index = jnp.arange(t)[None], jnp.arange(s)[None]
    q_pos, k_pos = q_index, k_index
    if positions is not None:
        q_pos, k_pos = positions if isinstance(positions, tuple) else (positions, positions)
    positions = (q_pos[:, None, :, None], k_pos[:, None, None, :])
    attends = jnp.ones((1, 1, t, s), bool)
    if mask is not None:
        attends &= jnp.repeat(jnp.asarray(mask.to_listed()), h // mask.heads, axis=1)
        attends &= _rule(*positions, mask.is_causal, mask.local_window_size)
    attends &= _rule(*positions, is_causal, local_window_size)
    if query_seq_lengths is not None:
        attends &= (q_index < query_seq_lengths[:, None])[:, None, :, None]
    if key_value_seq_lengths is not None:
        attends &= (k_index < key_value_seq_lengths[:, None])[:, None, None, :]
    if segment_ids is not None:
        q_seg, k_seg = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        attends &= (q_seg[:, None, :, None] == k_seg[:, None, None, :]) & (q_seg >= 0)[:, None, :, None]

    logits = jnp.where(attends, logits, -jnp.inf)
    top = logits.max(-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(dtype).reshape(1, h, 1, -1)
        top = jnp.maximum(top, sink.max(-1, keepdims=True))
    top = lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))
    weights = jnp.where(attends, jnp.exp(jnp.where(attends, logits, top) - top), 0.0)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - top).sum(-1, keepdims=True)
    if mask is not None and (lost := mask.incomplete_heads()) is not None:
        total = jnp.where(jnp.repeat(lost, h // mask.heads, axis=1)[:, :, None, None], jnp.nan, total)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    out = jnp.einsum("bhts,bshd->bthd", weights / total, v, precision=lax.Precision.HIGHEST).astype(query.dtype)
    if not return_lse:
        return out
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))[..., 0]
    return out, lse.swapaxes(1, 2)


def _rule(q: Array, k: Array, is_causal: bool, window: int | tuple[int | None, int | None] | None) -> Array:
    """Distances up to 2**32 - 1, as those of int32 positions are: exact in uint32."""
    left, right = window if isinstance(window, tuple) else (window, window)
    distance = jnp.where(q >= k, q - k, k - q).astype(jnp.uint32)
    ok = jnp.ones_like(distance, dtype=bool)
    if is_causal:
        ok &= q >= k
    if left is not None:
        ok &= (q < k) | (distance <= jnp.uint32(min(left, 2**32 - 1)))
    if right is not None:
        ok &= (q > k) | (distance <= jnp.uint32(min(right, 2**32 - 1)))
    return ok
