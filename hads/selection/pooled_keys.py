"""PooledKeys: the keys of a cache pooled for the choice of blocks, kept beside the cache and updated as it grows."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.pooled import KIND_OF_PART, blocks_of, key_features
from xsake.hads.selection.program import by_kernels_or_xla, unsupported
from xsake.hads.selection.rows import Rows


class PooledKeys(NamedTuple):
    """One layer's keys pooled over blocks, float32: 5 D numbers per block and KV head. Blocks without tokens are 0.

    They are the keys' side of the pooled features (`pooled.key_parts`), in one array: new blocks are written at once.
    """

    features: Float[Array, "B K n five D"]

    @classmethod
    def empty(cls, *, batch: int, kv_heads: int, blocks: int, head_dim: int) -> PooledKeys:
        """Room for `blocks` blocks of keys, none of them written."""
        return cls(jnp.zeros((batch, kv_heads, blocks, len(KIND_OF_PART), head_dim), jnp.float32))

    @property
    def blocks(self) -> int:
        return self.features.shape[2]

    @property
    def mean(self) -> Float[Array, "B K n D"]:
        return self.features[..., 0, :]

    @property
    def variance(self) -> Float[Array, "B K n D"]:
        return self.features[..., 1, :]

    def parts(self, blocks: int) -> Float[Array, "B K n five_D"]:
        """The features of the first `blocks` blocks."""
        return self.features[:, :, :blocks].reshape(*self.features.shape[:2], blocks, -1)

    def write(self, key: Float[Array, "B T K D"], lengths: Int[Array, "B"], *, start: int, block: int) -> PooledKeys:
        """With the blocks of new keys, which begin at token `start`, a multiple of the block.

        A key at or after its sequence's length is padding and does not count.
        """
        if start % block:
            raise ValueError(f"{start=} must be a multiple of the block of {block} tokens")
        end = start + key.shape[1]
        if end > self.blocks * block:
            raise ValueError(f"keys up to token {end} do not fit {self.blocks} pooled blocks of {block} tokens")
        grid = CausalGrid(end, block)
        kernel, xla = (partial(by, grid, start // block) for by in (_pool_by_kernel, _pool_by_xla))
        given = self.features, key, jnp.asarray(lengths, jnp.int32)
        return PooledKeys(by_kernels_or_xla(kernel, xla, unsupported(key.shape[-1], grid), *given))

    def write_last(
        self, keys: Float[Array, "B S K D"], lengths: Int[Array, "B"], *, block: int, tokens: int = 1
    ) -> PooledKeys:
        """With the blocks of each sequence's last `tokens` tokens, from the keys of the cache."""
        number = -(-(tokens - 1) // block) + 1  # as many blocks as the tokens can touch
        kernel, xla = (partial(by, block, number) for by in (_pool_last_by_kernel, _pool_last_by_xla))
        why_not = unsupported(keys.shape[-1], CausalGrid(self.blocks * block, block))
        return PooledKeys(by_kernels_or_xla(kernel, xla, why_not, self.features, keys, lengths))


def _pool_last_by_kernel(block: int, number: int, features: Array, keys: Array, lengths: Array) -> Array:
    from xsake.hads.selection.gpu.last_blocks import pool_last_blocks

    return pool_last_blocks(features, keys, lengths, block=block, number=number)


def _pool_last_by_xla(block: int, number: int, features: Array, keys: Array, lengths: Array) -> Array:
    row = jnp.arange(keys.shape[0])
    for back in range(number):
        last = jnp.maximum(jnp.maximum(lengths - 1, 0) // block - back, 0)
        slots = last[:, None] * block + jnp.arange(block, dtype=jnp.int32)[None]
        # A slot past the cache repeats its last one, which `lengths` leaves out.
        own = jnp.take_along_axis(keys, jnp.minimum(slots, keys.shape[1] - 1)[:, :, None, None], 1)
        new = jnp.stack(key_features(own[:, None], (slots < lengths[:, None])[:, None]), 3)
        features = features.at[row, :, last].set(new[:, :, 0])
    return features


def _pool_by_kernel(grid: CausalGrid, first: int, features: Array, key: Array, lengths: Array) -> Array:
    from xsake.hads.selection.gpu.estimate import pool_keys

    return pool_keys(key, Rows(grid, first, lengths), into=features)


def _pool_by_xla(grid: CausalGrid, first: int, features: Array, key: Array, lengths: Array) -> Array:
    new = jnp.stack(key_features(blocks_of(key, grid.block), Rows(grid, first, lengths).keys(first)), 3)
    return features.at[:, :, first : first + new.shape[2]].set(new)
