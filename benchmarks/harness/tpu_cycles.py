"""Whole calls on a TPU: the cycles of a schedule times the steps of a mask."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.harness.tpu_schedule import TILE

GRID_STEP = 140


def masks_like_hads(causal: bool, heads: int = 16, blocks: int = 32) -> tuple[Any, Any]:
    """A mask of heads with 10% to 90% of the blocks, and a mask of equal heads with as many blocks in all."""
    rng = np.random.default_rng(0)
    allowed = np.tril(np.ones((blocks, blocks), bool)) if causal else np.ones((blocks, blocks), bool)
    chance = rng.random((heads, blocks, blocks))
    unequal = (chance < np.linspace(0.1, 0.9, heads)[:, None, None]) & allowed
    share = unequal.sum() / (heads * allowed.sum())
    # The uniform mask has the same number of blocks, chosen by the same chances.
    cut = np.sort(chance[:, allowed].ravel())[round(share * heads * allowed.sum()) - 1]
    return unequal, (chance <= cut) & allowed


def ours_in_all(blocks: Any, causal: bool, row: dict[str, Any]) -> dict[str, float]:
    """Cycles of a call.

    plain: inner cycles of all tiles, and 140 per grid step
    strict: loop cycles of all chunks, and 140 + step per grid step
    """
    active = blocks.sum(-1)
    full = active - np.diagonal(blocks, axis1=-2, axis2=-1) if causal else active
    tiling, area = row["tiling"], row["areas"][0] // row["tiling"]["wide"]
    wide = full // tiling["wide"]
    narrow = -(-(active - wide * tiling["wide"]) // tiling["narrow"])
    first, tested = row["loops"][0], row["loops"][-1]
    loops = wide.sum() * tiling["wide"] * first["loop"] + narrow.sum() * tiling["narrow"] * tested["loop"]
    return {
        "plain": float(active.sum() * first["inner"] * area / TILE + GRID_STEP * active.size),
        "strict": float(loops * area / TILE + (GRID_STEP + row["step"]) * active.size),
    }


def cycles(row: dict[str, Any], blocks: Any, causal: bool, block: int) -> float:
    """Cycles of all grid steps over a mask bool[H, rows, columns], whose rows the steps own; chunks as in Walk."""
    tiling = row["tiling"]
    entries = block // tiling["entry"]
    tiles = blocks.sum(-1) * entries
    full = tiles - np.diagonal(blocks, axis1=-2, axis2=-1) * entries if causal else tiles
    if tiling["mixed"]:  # the last wide chunk need not be full
        wide = (tiles + tiling["wide"] // 2 - 1) // tiling["wide"]
    else:
        wide = full // tiling["wide"]
    narrow = -(-np.maximum(tiles - wide * tiling["wide"], 0) // tiling["narrow"])
    first, last = row["loops"][0]["loop"], row["loops"][-1]["loop"]
    loops = wide * row["areas"][0] * first / TILE + narrow * row["areas"][-1] * last / TILE
    return float((loops + row["step"] + GRID_STEP).sum()) * (block // tiling["own"]) / tiling["fold"]


def splash_in_all(blocks: Any, row: dict[str, Any]) -> float:
    """Cycles of splash: its grid is as wide as the fullest row of any head, and a step without work costs 140 too."""
    active = blocks.sum(-1)
    return float(active.sum() * row["loops"][0]["inner"] + GRID_STEP * active.size * active.max())
