"""PooledKeys: what the choice of blocks needs of the keys in a cache, kept beside the cache and updated as it grows."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from xsake.hads.selection.pooled import key_parts, variance


class PooledKeys(NamedTuple):
    """One layer's keys pooled over blocks, float32: 4 D numbers per block and KV head. Blocks without tokens are 0."""

    mean: Float[Array, "B K n D"]
    variance: Float[Array, "B K n D"]
    largest: Float[Array, "B K n D"]
    smallest: Float[Array, "B K n D"]

    @classmethod
    def empty(cls, *, batch: int, kv_heads: int, blocks: int, head_dim: int) -> PooledKeys:
        shape = (batch, kv_heads, blocks, head_dim)
        return cls(*(jnp.zeros(shape, jnp.float32) for _ in cls._fields))

    @property
    def blocks(self) -> int:
        return self.mean.shape[2]

    def parts(self, blocks: int) -> Float[Array, "B K n five_D"]:
        """The keys' side of the pooled features of the first `blocks` blocks."""
        return jnp.concatenate(key_parts(*(x[:, :, :blocks] for x in self)), -1)

    def write(self, key: Float[Array, "B T K D"], lengths: Int[Array, "B"], *, start: int, block: int) -> PooledKeys:
        """With the blocks of new keys, which begin at token `start`, a multiple of the block.

        A key at or after its sequence's length is padding and does not count.
        """
        if start % block:
            raise ValueError(f"{start=} must be a multiple of the block of {block} tokens")
        tail = -key.shape[1] % block
        keys = jnp.pad(key, ((0, 0), (0, tail), (0, 0), (0, 0)))
        places = start + jnp.arange(keys.shape[1], dtype=jnp.int32)
        new = _pool(keys, places[None] < jnp.minimum(lengths, start + key.shape[1])[:, None], block)
        return PooledKeys(
            *(
                old.at[:, :, start // block : start // block + x.shape[2]].set(x)
                for old, x in zip(self, new, strict=True)
            )
        )

    def write_last(
        self, keys: Float[Array, "B S K D"], lengths: Int[Array, "B"], *, block: int, tokens: int = 1
    ) -> PooledKeys:
        """With the blocks of each sequence's last `tokens` tokens, from the keys of the cache."""
        row, now = jnp.arange(keys.shape[0]), self
        for back in range(-(-(tokens - 1) // block) + 1):  # as many blocks as the tokens can touch
            last = jnp.maximum(jnp.maximum(lengths - 1, 0) // block - back, 0)
            slots = last[:, None] * block + jnp.arange(block, dtype=jnp.int32)[None]
            # A slot past the cache repeats its last one, which `lengths` leaves out.
            own = jnp.take_along_axis(keys, jnp.minimum(slots, keys.shape[1] - 1)[:, :, None, None], 1)
            new = _pool(own, slots < lengths[:, None], block)
            now = PooledKeys(*(old.at[row, :, last].set(x[:, :, 0]) for old, x in zip(now, new, strict=True)))
        return now


def _pool(keys: Float[Array, "B T K D"], valid: Array, block: int) -> tuple[Array, ...]:
    """(mean, variance, largest, smallest) of each block's valid tokens, [B, K, n, D] each."""
    b, t, heads, d = keys.shape
    x = keys.reshape(b, t // block, block, heads, d).astype(jnp.float32)
    here = valid.reshape(b, t // block, block, 1, 1)
    count = jnp.maximum(here.sum(2), 1).astype(jnp.float32)
    real = jnp.where(here, x, 0)
    mean = real.sum(2) / count
    largest = jnp.where(here, x, -jnp.inf).max(2)
    smallest = jnp.where(here, x, jnp.inf).min(2)
    any_here = here.any(2)
    parts = (
        mean,
        variance(jnp.square(real).sum(2) / count, mean),
        jnp.where(any_here, largest, 0),
        jnp.where(any_here, smallest, 0),
    )
    return jax.tree.map(lambda part: part.swapaxes(1, 2), parts)
