"""Attention to one key and value per block: a query sees the blocks that end at its own token or before."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake._op.attention import attention
from xsake.hads.mask.block_mask import BlockMask

_BLOCK = 64  # of the mask: queries, and compressed keys


def compressed_attention(
    query: Array, key: Array, value: Array, *, block_size: int, segment: Array | None, **options: Any
) -> tuple[Array, Array]:
    """[B, T, H, Dv] for key [B, n, K, D] and value [B, n, K, Dv], 0 for a query before the end of its first block; and
    the lse [B, T, H]."""
    t, n = query.shape[1], key.shape[1]
    token, last = np.arange(t, dtype=np.int32), (np.arange(n, dtype=np.int32) + 1) * block_size - 1
    rows, columns = (np.arange(0, length, _BLOCK) for length in (t, n))
    seen = last[columns][None, :] <= np.minimum(rows + _BLOCK, t)[:, None] - 1
    mask = BlockMask.from_blocks(seen, block_q=_BLOCK, block_kv=_BLOCK, q_len=t, kv_len=n)
    segments = None
    if segment is not None:
        segments = (segment, segment[:, ::block_size][:, :n])
    positions = (jnp.asarray(token)[None], jnp.asarray(last)[None])
    options |= dict(positions=positions, segment_ids=segments, return_lse=True)
    return attention(query, key, value, mask, is_causal=True, **options)
