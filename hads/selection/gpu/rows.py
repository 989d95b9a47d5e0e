"""Rows: which rows of blocks the kernels that make a mask are given: those of a whole sequence, or of a chunk of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Int

from xsake.hads.mask.lists.triton_call import whole
from xsake.hads.profile.causal_grid import CausalGrid


class Rows(NamedTuple):
    """The rows of a grid from row `first` on, for sequences of these lengths; None means that all tokens exist.

    A kernel gets the lengths as an `input`, and passes its reference to the methods that ask for `length_ref`.
    """

    grid: CausalGrid
    first: int = 0
    lengths: Int[Array, "B"] | None = None

    @property
    def number(self) -> int:
        return self.grid.side - self.first

    @property
    def short(self) -> bool:
        """Whether a block may have fewer tokens than others."""
        return self.lengths is not None or self.grid.length % self.grid.block > 0

    def input(self, batch: int) -> tuple[Array, pl.BlockSpec]:
        """The lengths, of which a program sees that of its sequence."""
        lengths = jnp.full(batch, self.grid.length, jnp.int32) if self.lengths is None else self.lengths
        return lengths[:, None], whole(None, 1)

    def side(self, length_ref: Any) -> Any:
        """How many rows of blocks the sequence has. Row j of these has j + 1 blocks."""
        if self.lengths is None:
            return self.grid.side
        return lax.div(length_ref[0] + (self.grid.block - 1), jnp.int32(self.grid.block))

    def tokens_in(self, block: Array, length_ref: Any) -> Array | None:
        """How many tokens of a block exist; None means all."""
        if not self.short:
            return None
        end = jnp.minimum(length_ref[0], self.grid.length)
        return jnp.clip(end - block * self.grid.block, 0, self.grid.block)

    def size(self, tokens: Array | None) -> Any:
        """What a sum over a block's tokens is divided by for their mean."""
        return float(self.grid.block) if tokens is None else jnp.maximum(tokens, 1).astype(jnp.float32)
