"""Exact budgets: from a share of the causal blocks to a whole number of blocks for every layer and head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.profile import HadsProfile


def layer_counts(profile: HadsProfile, budget: float, length: int, *, heads: int | None = None) -> np.ndarray:
    """i64[L]: how many blocks each layer keeps, over all its heads. The layers' sum is `budget`, rounded to one block.

    `budget` is a share of the causal blocks of all layers and heads at `length` tokens; diagonal blocks count as whole
    blocks. `heads` is the number of masks per layer: query heads by default, or KV heads where the query heads of a
    group share a mask. Raises ValueError if the budget does not cover the forced blocks.
    """
    grid = profile.grid(length)
    heads = profile.q_heads if heads is None else heads
    return _divided(_shares(profile, profile.layer_shares, budget, grid, heads), heads, budget, grid)


def chunk_counts(
    profile: HadsProfile,
    budget: float,
    lengths: Sequence[int],
    chunk: int,
    answers: Sequence[Sequence[int]] | None = None,
) -> np.ndarray:
    """i64[chunks, L, B]: how many blocks each layer keeps in each chunk of each sequence, over all its heads.

    The chunks of a sequence sum to its `layer_counts`, to the block. Every chunk keeps its forced blocks and as many
    others as its rows would win if they competed with all rows, which they cannot: `_row_weights`. `chunk` is in
    tokens, a multiple of the profile's `block_q`. `answers` are those of `select_chunk`: the rows before them win more.
    """
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1 or chunk % profile.block_q:
        raise ValueError(f"{chunk=} must be a multiple of the profile's rows of {profile.block_q} tokens")
    chunks = -(-max(lengths) // chunk)
    counts = np.zeros((chunks, profile.layers, len(lengths)), np.int64)
    for n, length in enumerate(lengths):
        kept = row_counts(profile, budget, length, () if answers is None else answers[n])
        starts = np.arange(0, kept.shape[1], chunk // profile.block_q)
        counts[: len(starts), :, n] = np.add.reduceat(kept, starts, -1).T
    return counts


def row_counts(profile: HadsProfile, budget: float, length: int, answers: Sequence[int] = ()) -> np.ndarray:
    """i64[L, rows]: the part of each row in the counts of the chunk that it is in (`chunk_counts`)."""
    grid = profile.grid(length)
    forced, free = grid.row_counts()
    by_layer = layer_counts(profile, budget, length) - profile.q_heads * grid.forced_blocks
    weights = np.broadcast_to(_row_weights(grid, free, answers), (profile.layers, grid.rows))
    return apportion(weights, by_layer, profile.q_heads * free) + profile.q_heads * forced


def _row_weights(grid: CausalGrid, free: np.ndarray, answers: Sequence[int]) -> np.ndarray:
    """f64[rows]: how many blocks that are not forced a row wins among all rows, but for a factor.

    A row of twice as many blocks needs fewer than twice as many of them: its weight is the root of their number. A row
    whose errors count w times keeps every block whose gain exceeds 1 / w of the threshold: w ** (1 / 3) times as many.
    Both exponents were measured: SmolLM2 at 4096 tokens, three domains, budgets of 20% to 43%.
    """
    return np.sqrt(free) * np.cbrt(grid.row_weights(answers))


def uniform_counts(layers: int, heads: int, budget: float, grid: CausalGrid) -> np.ndarray:
    """i64[L]: as `layer_counts`, but the same number for every layer (to one block)."""
    return _divided(np.ones(layers), heads, budget, grid)


def _divided(shares: np.ndarray, heads: int, budget: float, grid: CausalGrid) -> np.ndarray:
    """i64[L]: the blocks of a budget, divided among layers in proportion to their `shares`."""
    free, _ = _free(budget, grid, len(shares) * heads)
    room = np.full(len(shares), heads * (grid.blocks - grid.forced_blocks))
    return apportion(shares * room, free, room) + heads * grid.forced_blocks


def head_counts(profile: HadsProfile, budget: float, length: int) -> np.ndarray:
    """i64[L, H]: `layer_counts` divided among a layer's heads in the proportions that calibration found on average."""
    grid = profile.grid(length)
    shares = _shares(profile, profile.head_shares, budget, grid, profile.q_heads)
    room = np.full(profile.q_heads, grid.blocks - grid.forced_blocks)
    by_layer = layer_counts(profile, budget, length) - profile.q_heads * grid.forced_blocks
    return apportion(shares * room, by_layer, room) + grid.forced_blocks


def threshold(profile: HadsProfile, budget: float, length: int) -> float:
    """For the elastic mode: blocks of at least this gain are, on average, `budget` of the causal blocks."""
    grid = profile.grid(length)
    free, free_total = _free(budget, grid, profile.layers * profile.q_heads)
    if free == free_total:
        return 0.0
    return float(
        np.exp(np.interp(free / free_total, np.asarray(profile.free_shares), np.asarray(profile.log_thresholds)))
    )


def apportion(weights: np.ndarray, total: int | np.ndarray, room: np.ndarray) -> np.ndarray:
    """Divide `total` in proportion to `weights` into whole numbers that sum to `total`, none above its `room`.

    The excess over a room is divided among the others in proportion. Units left by rounding go to the largest
    remainders.
    With totals [L] and weights [L, n], every row is divided for itself.

    >>> apportion(np.array([1.0, 1.0, 8.0]), 10, np.array([9, 9, 6])).tolist()
    [2, 2, 6]
    """
    if np.min(total) < 0 or np.max(total) > room.sum():
        raise ValueError(f"{total=} must be between 0 and the room of {room.sum()}")
    totals = np.asarray(total)[..., None]
    exact = np.zeros(weights.shape)
    full = np.zeros(weights.shape, bool)
    for _ in range(weights.shape[-1]):
        left = totals - np.where(full, room, 0).sum(-1, keepdims=True)
        open_weights = np.where(full, 0.0, np.maximum(weights, 1e-12))
        exact = np.where(full, room, left * open_weights / np.maximum(open_weights.sum(-1, keepdims=True), 1e-300))
        over = ~full & (exact > room)
        if not over.any():
            break
        full |= over
    exact = np.minimum(exact, room)
    whole = np.floor(exact + 1e-9).astype(np.int64)
    order = np.argsort(-np.where(whole < room, exact - whole, -1.0), axis=-1, kind="stable")
    rank = np.argsort(order, axis=-1)
    return whole + (rank < totals - whole.sum(-1, keepdims=True))


def _free(budget: float, grid: CausalGrid, heads: int) -> tuple[int, int]:
    """(free blocks that `budget` pays for, free blocks there are), over `heads` heads; free blocks are not forced."""
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 1:
        raise ValueError(f"{budget=} must be a share of the causal blocks, above 0 and at most 1")
    free = round(budget * heads * grid.blocks) - heads * grid.forced_blocks
    if free < 0:
        raise ValueError(
            f"{budget=} is below {grid.forced_blocks / grid.blocks:.4f}, the share of the blocks that are always on at "
            f"{grid.length} tokens in blocks of {grid.block}: allow more, use longer sequences or smaller blocks"
        )
    return free, heads * (grid.blocks - grid.forced_blocks)


def _shares(profile: HadsProfile, shares: Any, budget: float, grid: CausalGrid, heads: int) -> np.ndarray:
    """The entry for a budget of a profile's table, interpolated; 0 for no free block and 1 for all of them."""
    free, free_total = _free(budget, grid, profile.layers * heads)
    share, table = free / max(free_total, 1), np.asarray(shares)
    x = np.concatenate([[0.0], np.asarray(profile.free_shares), [1.0]])
    y = np.concatenate([np.zeros((1, *table.shape[1:])), table, np.ones((1, *table.shape[1:]))])
    flat = y.reshape(len(x), -1)
    return np.stack([np.interp(share, x, column) for column in flat.T]).reshape(table.shape[1:])
