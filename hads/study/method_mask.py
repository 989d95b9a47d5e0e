"""MethodMask: any registered method as a model's mask function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.selection.select import check_inputs
from xsake.hads.study.layer import Blocks, Layer
from xsake.hads.study.methods import METHODS


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("profile", "counts", "with_forced", "knowledge"),
    meta_fields=("program", "transpose"),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodMask:
    """A mask function for `Transformer(..., mask_fn=...)`: a method of `METHODS` that keeps `counts[layer]` blocks.

    Counts are over a layer's query heads, as `hads.layer_counts` gives them. A pytree: new counts, another profile, new
    knowledge, and forced blocks or none, do not recompile.
    """

    program: Callable[[Layer], Blocks]
    profile: HadsProfile
    counts: Any
    with_forced: Any
    knowledge: Any = None
    transpose: bool = False

    @classmethod
    def of(
        cls, name: str, profile: HadsProfile, counts: Any, *, knowledge: Any = None, transpose: bool = False
    ) -> MethodMask:
        method = METHODS[name]
        return cls(
            program=method.program,
            profile=profile if method.adapt is None else method.adapt(profile),
            counts=jnp.asarray(counts, jnp.int32),
            with_forced=jnp.asarray(method.forced),
            knowledge=knowledge,
            transpose=transpose,
        )

    def blocks(self, layer: Any, query: Array, key: Array) -> Blocks:
        """The kept blocks, bool[B, H, n, n]."""
        grid = check_inputs(query, key, self.profile, layer)
        query, key = jax.lax.stop_gradient((query, key))
        count = self.counts[layer]
        return self.program(Layer(query, key, grid, layer, count, self.profile, self.with_forced, self.knowledge))

    def __call__(self, layer: Any, query: Array, key: Array) -> BlockMask:
        return causal_mask(self.blocks(layer, query, key), self.profile.block, query.shape[1], self.transpose)


def causal_mask(blocks: Blocks, block: int, length: int, transpose: bool = False) -> BlockMask:
    return BlockMask.from_blocks(
        blocks, block_q=block, block_kv=block, q_len=length, kv_len=length, is_causal=True, transpose=transpose
    )
