"""Several sequences in one row of tokens (`cu_seqlens`), laid out so that each begins with a block of its own."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake._ground.device import on_host
from xsake._ground.explicit import over_explicit_axes
from xsake._ground.integers import as_int32
from xsake._ground.trace import vary, varying_axes


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Places of tokens once every sequence is padded to whole blocks. Block numbers of a sequence begin at 0.

    `place` [T] is the new index of each token, `length` for tokens past the last sequence; `segment` [1, length] is
    the sequence of each new place, -1 where there is no token; `first_block` and `num_blocks` [T] are the first block
    of each token's sequence and the number of its blocks. If traced `cu_seqlens` are wrong, every token has a place,
    but no block.
    """

    length: int
    place: Array
    segment: Array
    first_block: Array
    num_blocks: Array

    @classmethod
    def of(cls, cu_seqlens: Any, batch: int, tokens: int, block_size: int) -> Sequences:
        bounds = jnp.asarray(cu_seqlens)
        if not jnp.issubdtype(bounds.dtype, jnp.integer):
            raise TypeError(f"cu_seqlens must be integers, got dtype {bounds.dtype}")
        if bounds.ndim != 1 or bounds.shape[0] < 2:
            raise ValueError(f"cu_seqlens must be [sequences + 1]; got shape {tuple(bounds.shape)}")
        if batch != 1:
            raise ValueError(f"cu_seqlens needs a batch of 1, which holds all sequences; got {batch}")
        if not isinstance(bounds, jax.core.Tracer):
            given = on_host(bounds)
            if given[0] != 0 or (np.diff(given) < 0).any() or given[-1] > tokens:
                raise ValueError(
                    f"cu_seqlens must begin with 0, never fall, and end at {tokens} tokens or before; got "
                    f"{given[:8].tolist()}{' ...' if len(given) > 8 else ''}"
                )
        bounds = jnp.asarray(as_int32("cu_seqlens", bounds))
        count = bounds.shape[0] - 1
        length = -(-(tokens + count * (block_size - 1)) // block_size) * block_size
        token = jnp.arange(tokens, dtype=jnp.int32)
        sequence = jnp.searchsorted(bounds[1:], token, side="right").astype(jnp.int32)
        blocks = -(-jnp.diff(bounds) // block_size)
        first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(blocks, dtype=jnp.int32)])
        own = jnp.minimum(sequence, count - 1)
        inside = sequence < count
        place = jnp.where(inside, first[own] * block_size + token - bounds[own], length)
        right = (bounds[0] == 0) & (jnp.diff(bounds) >= 0).all() & (bounds[-1] <= tokens)
        place = jnp.where(right, place, token)
        segment = jnp.full((length,), -1, jnp.int32).at[place].set(own, mode="drop")
        return cls(length, place, segment[None], first[own], jnp.where(right, blocks[own], 0))

    def spread(self, x: Array, fill: Any = 0) -> Array:
        """[1, T, ...] laid out anew, [1, length, ...]."""

        def spread(x: Array, place: Array) -> Array:
            new = vary(jnp.full((1, self.length, *x.shape[2:]), fill, x.dtype), varying_axes(x))
            return new.at[:, place].set(x, mode="drop")

        return over_explicit_axes(spread, (x, self.place), ("b t h", "t"), "b t h")

    def gather(self, x: Array) -> Array:
        """The inverse of `spread`; 0 for tokens past the last sequence."""
        take = partial(jnp.take, axis=1, mode="fill", fill_value=0)
        return over_explicit_axes(take, (x, self.place), ("b t h", "t"), "b t h")

    def blocks(self, indices: Array | np.ndarray) -> Array:
        """Block numbers [1, T, heads, n] of each token's own sequence as numbers of the new layout, laid out anew.

        Where the sequence has no such block: ValueError, or the number -2 if that is known under jit only. So are all
        numbers, -1 too, of a token whose sequence has no block.
        """
        traced = any(isinstance(x, jax.core.Tracer) for x in (indices, self.place))
        given = (self.place, self.first_block, self.num_blocks)
        place, first, count = ((x if traced else on_host(x))[None, :, None, None] for x in given)
        wrong = ((indices < -1) | (indices >= count) | (count == 0)) & (place < self.length)
        if not traced and wrong.any():
            at = np.argwhere(wrong)[0]
            raise ValueError(
                f"block_indices must be -1 (none) or a block of the token's own sequence in cu_seqlens; got "
                f"{indices[tuple(at)]} at {at.tolist()}, where the sequence has {count[0, at[1], 0, 0]} blocks"
            )
        moved = jnp.where(wrong, -2, jnp.where(indices >= 0, indices + first, -1))
        return self.spread(moved, -1)

    def own_blocks(self, indices: Array) -> Array:
        """The inverse of `blocks`."""
        moved = self.gather(indices)
        return jnp.where(moved >= 0, moved - self.first_block[None, :, None, None], -1)
