"""`PooledKeys.write_last` as one GPU kernel, which changes the pooled keys in place."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float, Int

from xsake.hads.mask.lists.triton_call import iota, triton_call, whole
from xsake.hads.selection.pooled import key_parts, variance

_NUMBERS_PER_WARP = 2048


def pool_last_blocks(
    features: Float[Array, "B K n five D"],
    keys: Float[Array, "B S K D"],
    lengths: Int[Array, "B"],
    *,
    block: int,
    number: int,
) -> Float[Array, "B K n five D"]:
    """The features, with the last `number` blocks that each sequence has tokens in pooled anew."""
    b, slots, kv_heads, d = keys.shape
    n = features.shape[2]

    def kernel(keys_ref: Any, length_ref: Any, before_ref: Any, features_ref: Any) -> None:
        length = length_ref[0]
        at = lax.div(jnp.maximum(length - 1, 0), jnp.int32(block)) - pl.program_id(0)

        # A sequence past the cache's end has lost its tokens.
        @pl.when((at >= 0) & (at < n))
        def _() -> None:
            token = at * block + iota(block)
            here = jnp.broadcast_to((token < jnp.minimum(length, slots))[:, None], (block, d))
            x = plgpu.load(keys_ref.at[pl.ds(at * block, block), :], mask=here, other=0.0).astype(jnp.float32)
            count = jnp.maximum(jnp.clip(length - at * block, 0, block), 1).astype(jnp.float32)
            mean = x.sum(0) / count
            spread = variance((x * x).sum(0) / count, mean)
            empty = length <= 0
            largest, smallest = jnp.where(here, x, -jnp.inf).max(0), jnp.where(here, x, jnp.inf).min(0)
            extremes = (jnp.where(empty, 0.0, extreme) for extreme in (largest, smallest))
            for part, found in enumerate(key_parts(mean, spread, *extremes)):
                features_ref[at, part, :] = found

    every = whole(None, None, *features.shape[2:])
    (found,) = triton_call(
        kernel,
        "hads_pool_last_blocks",
        (number, kv_heads, b),
        [
            (keys, pl.BlockSpec((None, slots, None, d), lambda i, k, b: (b, 0, k, 0))),
            (lengths[:, None], whole(None, 1)),
            (features, every),
        ],
        [(features.shape, features.dtype, every)],
        num_warps=min(max(block * d // _NUMBERS_PER_WARP, 1), 8),
        aliases={2: 0},
    )
    return found
