"""How one threshold over all layers and heads divides a budget among them: the profile's tables."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.profile import FREE_SHARES


class Tables(NamedTuple):
    """The fields of the same names of a profile, for the X budgets of FREE_SHARES."""

    layer_shares: np.ndarray  # [X, L]
    head_shares: np.ndarray  # [X, L, H]
    log_thresholds: np.ndarray  # [X]


def tabulate(gains: list[np.ndarray], grid: CausalGrid) -> Tables:
    """From each sequence's gains [L, H, n, n], in any order within a head.

    Infinite gains (forced blocks) and negative ones (forbidden blocks) do not count. Each sequence has a threshold of
    its own at each budget; the tables hold means over sequences of the shares and of the threshold's logarithm.
    """
    with ThreadPoolExecutor() as pool:
        shares, logs = zip(*pool.map(lambda gain: _one(gain, grid), gains), strict=True)
    by_head = np.mean(shares, 0).astype(np.float32)
    return Tables(by_head.mean(-1), by_head, np.mean(logs, 0).astype(np.float32))


def _one(gain: np.ndarray, grid: CausalGrid) -> tuple[np.ndarray, np.ndarray]:
    """Of one sequence: the shares [X, L, H] and the logarithms of the thresholds [X]."""
    flat = gain.reshape(*gain.shape[:2], -1)
    flat = np.where(np.isfinite(flat), flat, np.float32(-1))
    free = np.sort(flat[flat >= 0])[::-1]
    places = np.clip(np.round(FREE_SHARES * len(free)).astype(int) - 1, 0, len(free) - 1)
    cuts = free[places]
    counts = np.stack([(flat >= cut).sum(-1) for cut in cuts])
    return counts / (grid.blocks - grid.forced_blocks), np.log(np.maximum(cuts, 1e-30))
