"""How one threshold over all layers and heads divides a budget among them: the profile's tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from xsake.hads.profile.profile import FREE_SHARES

AT_ONCE = 4  # sequences whose gains are sorted side by side: seconds each for a long text


class Tables(NamedTuple):
    """The fields of the same names of a profile, for the X budgets of FREE_SHARES."""

    layer_shares: np.ndarray  # [X, L]
    head_shares: np.ndarray  # [X, L, H]
    log_thresholds: np.ndarray  # [X]


def tabulate(gains: Iterable[Float[np.ndarray, "L H free"]]) -> Tables:
    """From the gains of each sequence's blocks that are neither forced nor forbidden, in any order within a head.

    Each sequence has a threshold of its own at each budget; the tables hold means over sequences of the shares and of
    the threshold's logarithm. AT_ONCE sequences' gains are in memory at a time, if `gains` makes them one at a time.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = [one for some in itertools.batched(gains, AT_ONCE) for one in pool.map(_one, some)]
    shares, logs = zip(*found, strict=True)
    by_head = np.mean(shares, 0).astype(np.float32)
    return Tables(by_head.mean(-1), by_head, np.mean(logs, 0).astype(np.float32))


def _one(gains: Float[np.ndarray, "L H free"]) -> tuple[np.ndarray, np.ndarray]:
    """For one sequence: the shares [X, L, H] and the logarithms of the thresholds [X]."""
    places = np.clip(np.round(FREE_SHARES * gains.size).astype(int) - 1, 0, gains.size - 1)
    cuts = np.sort(gains, axis=None)[gains.size - 1 - places]
    counts = np.stack([(gains >= cut).sum(-1) for cut in cuts])
    return counts / gains.shape[-1], np.log(np.maximum(cuts, 1e-30))
