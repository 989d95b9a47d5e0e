"""Exact budgets: from a share of the causal blocks to a whole number of blocks for every layer and head."""

from __future__ import annotations

import numpy as np

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.profile import HadsProfile


def layer_counts(profile: HadsProfile, budget: float, length: int, *, heads: int | None = None) -> np.ndarray:
    """i64[L]: the blocks that each layer keeps, all heads together, so that the model keeps `budget` of them exactly.

    `budget` is a share of all layers' and heads' causal blocks at `length` tokens, the diagonal ones counted whole; the
    sum is that share rounded to one block. `heads` is the number of masks a layer has: query heads by default, KV heads
    for one mask a group. ValueError if the blocks that are always on do not fit.
    """
    grid = profile.grid(length)
    heads = profile.q_heads if heads is None else heads
    free, free_total = _free(budget, grid, profile.layers * heads)
    share = free / max(free_total, 1)
    shares = _interpolate(share, np.asarray(profile.free_shares), np.asarray(profile.layer_shares))
    room = np.full(profile.layers, heads * (grid.blocks - grid.forced_blocks))
    return apportion(shares * room, free, room) + heads * grid.forced_blocks


def uniform_counts(layers: int, heads: int, budget: float, grid: CausalGrid) -> np.ndarray:
    """i64[L]: as `layer_counts`, every layer alike (to one block)."""
    free, _ = _free(budget, grid, layers * heads)
    room = np.full(layers, heads * (grid.blocks - grid.forced_blocks))
    return apportion(room.astype(float), free, room) + heads * grid.forced_blocks


def head_counts(profile: HadsProfile, budget: float, length: int) -> np.ndarray:
    """i64[L, H]: as `layer_counts`, with each layer's blocks given to its heads as calibration gave them on average."""
    grid = profile.grid(length)
    free, free_total = _free(budget, grid, profile.layers * profile.q_heads)
    points, table = np.asarray(profile.free_shares), np.asarray(profile.head_shares)
    shares = _interpolate(free / max(free_total, 1), points, table)
    room = np.full(profile.q_heads, grid.blocks - grid.forced_blocks)
    by_layer = layer_counts(profile, budget, length) - profile.q_heads * grid.forced_blocks
    return (
        np.stack([apportion(s * room, int(k), room) for s, k in zip(shares, by_layer, strict=True)])
        + grid.forced_blocks
    )


def threshold(profile: HadsProfile, budget: float, length: int) -> float:
    """The gain at which `budget` cuts on average, for the elastic mode."""
    grid = profile.grid(length)
    free, free_total = _free(budget, grid, profile.layers * profile.q_heads)
    if free == free_total:
        return 0.0
    return float(
        np.exp(np.interp(free / free_total, np.asarray(profile.free_shares), np.asarray(profile.log_thresholds)))
    )


def apportion(weights: np.ndarray, total: int, room: np.ndarray) -> np.ndarray:
    """i64 shares of `total` in proportion to `weights`, none above its `room`, summing to `total` exactly.

    What does not fit under one's room goes to the others in proportion; the last units to the largest remainders.

    >>> apportion(np.array([1.0, 1.0, 8.0]), 10, np.array([9, 9, 6])).tolist()
    [2, 2, 6]
    """
    if not 0 <= total <= room.sum():
        raise ValueError(f"{total=} must be between 0 and the room of {room.sum()}")
    exact = np.zeros(len(room))
    full = np.zeros(len(room), bool)
    for _ in range(len(room)):
        left = total - room[full].sum()
        open_weights = np.where(full, 0.0, np.maximum(weights, 1e-12))
        exact = np.where(full, room, left * open_weights / max(open_weights.sum(), 1e-300))
        over = ~full & (exact > room)
        if not over.any():
            break
        full |= over
    exact = np.minimum(exact, room)
    whole = np.floor(exact + 1e-9).astype(np.int64)
    order = np.argsort(-np.where(whole < room, exact - whole, -1.0), kind="stable")
    whole[order[: total - whole.sum()]] += 1
    return whole


def _free(budget: float, grid: CausalGrid, heads: int) -> tuple[int, int]:
    """Blocks beyond the forced ones that `budget` pays for, of how many, over so many heads."""
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 1:
        raise ValueError(f"{budget=} must be a share of the causal blocks, above 0 and at most 1")
    free = round(budget * heads * grid.blocks) - heads * grid.forced_blocks
    if free < 0:
        raise ValueError(
            f"{budget=} is below {grid.forced_blocks / grid.blocks:.4f}, the share of the blocks that are always on at "
            f"{grid.length} tokens in blocks of {grid.block}: allow more, use longer sequences or smaller blocks"
        )
    return free, heads * (grid.blocks - grid.forced_blocks)


def _interpolate(share: float, points: np.ndarray, table: np.ndarray) -> np.ndarray:
    """A row of the table for `share`; 0 at 0 and 1 at 1 hold whatever was measured."""
    x = np.concatenate([[0.0], points, [1.0]])
    y = np.concatenate([np.zeros((1, *table.shape[1:])), table, np.ones((1, *table.shape[1:]))])
    flat = y.reshape(len(x), -1)
    return np.stack([np.interp(share, x, column) for column in flat.T]).reshape(table.shape[1:])
