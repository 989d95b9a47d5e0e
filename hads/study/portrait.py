"""HADS's masks on one text: the share that each head keeps, and the head whose mask is worth a picture."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from xsake.hads.calibration.observe import observe
from xsake.hads.profile.budgets import layer_counts
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.selection.choice import choose
from xsake.hads.selection.rows import Rows


class Portrait(NamedTuple):
    """`shares[layer, head]` of the causal blocks that HADS keeps; for one head, true masses and kept blocks."""

    shares: np.ndarray
    layer: int
    head: int
    mass: np.ndarray
    kept: np.ndarray


def portrait(model: Any, profile: HadsProfile, tokens: np.ndarray, budget: float) -> Portrait:
    """HADS's choice from the queries and keys of dense attention.

    The head shown keeps at most the budget's share, and has the most kept mass outside the forced blocks among such
    heads: a fixed pattern would harm this head most.
    """
    grid = profile.grid(len(tokens))
    counts = layer_counts(profile, budget, grid.length)
    shares, best, found = [], -2.0, (0, 0, np.zeros((1, 1)), np.zeros((1, 1), bool))
    for number, layer in enumerate(observe(model, jnp.asarray(tokens[None], jnp.int32), grid)):
        chosen = choose(
            layer.mass(profile.estimator(number), grid),
            Rows(grid),
            sensitivity=profile.sensitivity[number],
            burstiness=profile.burstiness[number],
            count=int(counts[number]),
        )
        kept, mass = np.asarray(chosen[0]), np.asarray(layer.statistics.mass[0])
        shares.append(kept.sum((1, 2)) / grid.blocks)
        beyond = np.where(shares[-1] <= budget, (mass * kept * ~grid.forced()).sum((1, 2)), -1.0)
        if beyond.max() > best:
            head = int(beyond.argmax())
            best, found = float(beyond.max()), (number, head, mass[head], kept[head])
    return Portrait(np.stack(shares), *found)
