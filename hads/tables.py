"""How one threshold over all layers and heads divides a budget among them: the profile's tables."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from xsake.hads.causal_grid import CausalGrid

# Budgets of the tables, as shares of the blocks that are not forced.
FREE_SHARES = np.array([0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8], np.float32)


class Tables(NamedTuple):
    layer_shares: np.ndarray  # [X, L]
    head_shares: np.ndarray  # [X, L, H]
    log_thresholds: np.ndarray  # [X]


def tabulate(gains: list[np.ndarray], grid: CausalGrid) -> Tables:
    """From each sequence's gains [L, H, n, n] in any order within a head; only finite ones that are not negative count.

    Each sequence has its own threshold at each budget: shares and the logarithm of the threshold are means over them.
    """
    room = grid.blocks - grid.forced_blocks
    shares, logs = [], []
    for gain in gains:
        layers, heads = gain.shape[:2]
        free = np.sort(gain[np.isfinite(gain) & (gain >= 0)])[::-1]
        places = np.clip(np.round(FREE_SHARES * len(free)).astype(int) - 1, 0, len(free) - 1)
        cuts = free[places]
        flat = gain.reshape(layers, heads, -1)
        counts = [((flat >= cut) & np.isfinite(flat)).sum(-1) for cut in cuts]
        shares.append(np.stack(counts) / room)
        logs.append(np.log(np.maximum(cuts, 1e-30)))
    by_head = np.mean(shares, 0).astype(np.float32)
    return Tables(by_head.mean(-1), by_head, np.mean(logs, 0).astype(np.float32))
