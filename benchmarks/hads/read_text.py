"""A model that reads one text under a method's masks, with the masks themselves."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.hads.calibration.layerwise import Layers
from xsake.hads.profile.budgets import layer_counts
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.study import layerwise
from xsake.hads.study.methods.mask import MethodMask
from xsake.hads.study.texts import Text


def read_text(layers: Layers, profile: HadsProfile, text: Text, method: str, budget: float) -> tuple[Array, np.ndarray]:
    """(final states [1, T, width], kept blocks bool[layers, H, n, n]), as `study.layerwise.run` reads a text.

    Raises ValueError if a layer's blocks are not as many as the profile gives it.
    """
    counts = layer_counts(profile, budget, len(text.tokens))
    known = profile.on_device()
    mask_fn = MethodMask.of(method, known, counts)
    found: list[np.ndarray] = []
    states, kept = layerwise.run(
        layers,
        jnp.asarray(text.tokens[None], jnp.int32),
        mask_fn,
        watch=lambda blocks, *_: found.append(np.asarray(blocks[0])),
    )
    for number, (count, wanted) in enumerate(zip(np.asarray(kept).sum((1, 2)), counts, strict=True)):
        if count != wanted:
            raise ValueError(f"{method} at {budget:.0%}: layer {number} keeps {count} blocks, not {wanted}")
    return states, np.stack(found)
