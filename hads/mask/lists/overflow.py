"""Whether the lists of a mask, or of its shards, have all their blocks."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake._ground.device import on_host
from xsake.hads.mask.lists.rows import ArrayT


class MayOverflow:
    """Lists of blocks. A head lost blocks if its number of blocks, `kv_row_ptr[..., -1]`, is above the capacity.

    A mask built under jit loses blocks that do not fit the capacity or are out of range.
    """

    kv_indices: Any
    kv_row_ptr: Any
    grid: Any
    complete: bool  # known to have all blocks; False where only the contents tell (`incomplete_heads`)

    @property
    def capacity(self) -> int:
        """The number of list slots per head."""
        return self.kv_indices.shape[-1]

    @property
    def traced(self) -> bool:
        return any(isinstance(field, jax.core.Tracer) for field in vars(self).values())

    def read(self, lists: ArrayT) -> ArrayT:
        """Lists on the host where they are concrete: an explicit transfer, which `jax.transfer_guard` allows."""
        return jnp.asarray(lists) if self.traced else on_host(lists)

    def overflowed(self) -> Array | np.ndarray:
        """bool[b, h], for shards bool[n, b, h]: the head lost blocks. Possible only if built under jit."""
        ptr = self.kv_row_ptr
        return (ptr if isinstance(ptr, jax.core.Tracer) else on_host(ptr))[..., -1] > self.capacity

    def incomplete_heads(self) -> ArrayT | None:
        """`overflowed` of traced lists; None where every head is known to have all its blocks.

        Whoever computes with the blocks asks this first: concrete lists that overflowed raise ValueError, and what is
        computed from traced ones must stay poisoned, in these heads (`poisoned`, or NaN).
        """
        if self.complete:
            return None
        lost = self.overflowed()
        if isinstance(lost, jax.core.Tracer):
            return lost
        if lost.any():
            raise ValueError(
                f"mask was built under jit with capacity {self.capacity} and does not fit it, or names blocks out of "
                f"range: give it a larger capacity"
            )
        return None

    def poisoned(self, heads: ArrayT) -> Self:
        """These traced lists, with `heads`, bool[b or 1, h or 1], overflowed: there, attention returns NaN."""
        number = jnp.where(heads, jnp.int32(self.capacity + 1), 0)
        row_ptr = self.kv_row_ptr.at[..., -1].max(jnp.broadcast_to(number, self.kv_row_ptr.shape[:-1]))
        return dataclasses.replace(self, kv_row_ptr=row_ptr, complete=False)  # type: ignore[type-var]

    def density(self, *, per_head: bool = False) -> Array | np.ndarray | float:
        """Listed blocks over the blocks that the rule allows: one number, or [b, h] with `per_head=True`.

        NaN where a traced mask overflowed; ValueError where a concrete one did.
        """
        lost, number = self.incomplete_heads(), self.read(self.kv_row_ptr)[..., -1]
        if number.ndim == 3:  # of shards
            lost, number = None if lost is None else lost.any(0), number.sum(0)
        per = number / max(self.grid.num_allowed, 1)
        if lost is not None:
            per = jnp.where(lost, np.nan, per)
        return per if per_head else per.mean()
