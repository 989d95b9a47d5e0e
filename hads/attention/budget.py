"""How many blocks each layer keeps of a sequence that grows: chunk after chunk, or padded to a batch's longest."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from jaxtyping import Int

from xsake.hads.profile.budgets import layer_counts
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.profile import HadsProfile


def forced_share(grid: CausalGrid) -> float:
    """The share of the blocks that is always on."""
    return grid.forced_blocks / grid.blocks


@lru_cache(maxsize=32)
def kept_by_length(
    profile: HadsProfile, budget: float, spare: float, length: int
) -> tuple[Int[np.ndarray, "n L"], Int[np.ndarray, "n"]]:
    """For sequences of 0, 1, ... blocks of keys, up to `length` tokens: the blocks that each layer keeps over all
    heads, and the blocks that there are.

    A sequence keeps `budget` of its blocks, and at least `spare` times those that are always on. Differences of two
    entries are the counts of the rows between: the counts of a prompt's chunks sum to those of the prompt.
    """
    heads, blocks = profile.q_heads, -(-length // profile.block)
    grids = [profile.grid(min(n * profile.block, length)) for n in range(1, blocks + 1)]
    forced = np.array([0, *(grid.forced_blocks for grid in grids)]) * heads
    there = np.array([0, *(grid.blocks for grid in grids)]) * heads
    shares = [min(max(budget, spare * forced_share(grid)), 1.0) for grid in grids]
    kept = np.stack(
        [np.zeros(profile.layers, np.int64)]
        + [layer_counts(profile, share, grid.length) for share, grid in zip(shares, grids, strict=True)]
    )
    free = np.maximum.accumulate(kept - forced[:, None], 0)
    return np.minimum(free + forced[:, None], there[:, None]).astype(np.int32), there.astype(np.int32)
