"""How many blocks each layer keeps of a sequence that grows: chunk after chunk, or padded to a batch's longest."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from jaxtyping import Int

from xsake.hads.profile.budgets import apportion
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
    heads (`budgets.layer_counts`), and the blocks that there are.

    A sequence keeps `budget` of its blocks, and at least `spare` times those that are always on. Differences of two
    entries are the counts of the rows between: the counts of a prompt's chunks sum to those of the prompt.
    """
    heads, layers = profile.q_heads, profile.layers
    forced, there = _by_length(profile, -(-length // profile.block))
    share = np.minimum(np.maximum(budget, spare * forced / np.maximum(there, 1)), 1.0)
    free = np.round(share * layers * heads * there).astype(np.int64) - layers * heads * forced
    room = heads * (there - forced)
    budgets = np.concatenate([[0.0], np.asarray(profile.free_shares), [1.0]])
    of_layers = np.pad(np.asarray(profile.layer_shares), ((1, 1), (0, 0)), constant_values=((0, 1), (0, 0)))
    x = free / np.maximum(layers * room, 1)
    shares = np.stack([np.interp(x, budgets, of_layer) for of_layer in of_layers.T], -1)
    rooms = np.broadcast_to(room[:, None], shares.shape)
    kept = np.maximum.accumulate(apportion(shares * rooms, free, rooms), 0)
    return (kept + heads * forced[:, None]).astype(np.int32), (heads * there).astype(np.int32)


def _by_length(profile: HadsProfile, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """For 0, 1, ... blocks of keys: the blocks of a head that are always on, and all of them."""
    tall = profile.block_q // profile.block
    forced, free = profile.grid(-(-blocks // tall) * profile.block_q).row_counts()
    number = np.arange(blocks + 1)
    rows = -(-number // tall)
    short = rows * tall - number  # blocks that the last row lacks: of its own tokens, and always on
    sums = (np.concatenate([[0], np.cumsum(x)])[rows] - short for x in (forced, forced + free))
    return next(sums), next(sums)
