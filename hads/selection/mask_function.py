"""HADS as a model's mask function."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from xsake._ground.buckets import density_bucket
from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.mask.lists.order import OrderName
from xsake.hads.profile.budgets import layer_counts
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.selection.select import select

NAME = "in training"  # what profiles call a model that is being trained

_STATIC = ("transpose", "density_hint", "shards", "order", "heads_axis")


@partial(jax.tree_util.register_dataclass, data_fields=("profile", "counts"), meta_fields=_STATIC)
@dataclasses.dataclass(frozen=True)
class HadsMask:
    """`select` for every layer at an exact budget: `model(tokens, mask_fn=HadsMask.of(profile, 0.2, length))`.

    A pytree of arrays: as an argument of a compiled step, a new profile compiles nothing, and a new budget only if its
    `density_hint`, by which attention finds its tuned configuration, is another one.
    """

    profile: HadsProfile
    counts: Any  # i32[L]
    transpose: bool = True
    density_hint: float | None = None  # a bucket of half an octave
    shards: int | None = None  # of the sequence, with equal counts: `select`
    order: OrderName = "contiguous"
    heads_axis: str | tuple[str, ...] | None = None

    @classmethod
    def of(
        cls,
        profile: HadsProfile,
        budget: float,
        length: int,
        *,
        transpose: bool = True,
        shards: int | None = None,
        order: OrderName = "contiguous",
        heads_axis: str | tuple[str, ...] | None = None,
    ) -> HadsMask:
        """Masks of `budget` of the causal blocks for sequences of `length`; `transpose=False` for inference only.

        `shards`, `order` and `heads_axis` as in `select`.
        """
        counts = jnp.asarray(layer_counts(profile, budget, length), jnp.int32)
        return cls(profile, counts, transpose, density_bucket(budget), shards, order, heads_axis)

    def __call__(self, layer: int, query: Array, key: Array) -> BlockMask | None:
        """None for a layer that HADS leaves alone."""
        if self.profile.row(layer) is None:
            return None
        options = {name: getattr(self, name) for name in _STATIC}
        return select(query, key, self.profile, self.counts, layer=layer, **options)


def mask_shape(*, budget: float, block: int, length: int, **heads: Any) -> HadsMask:
    """The mask function that `recalibration` will give, with shapes for arrays; `heads` as in `profile_shape`."""
    from xsake.hads.profile.profile import profile_shape
    from xsake.hads.profile.rule import TRAINING

    profile = profile_shape(model=NAME, block=block, length=length, rule=TRAINING, **heads)
    counts = jax.ShapeDtypeStruct((profile.layers,), jnp.int32)
    return HadsMask(profile, counts, density_hint=density_bucket(budget))
