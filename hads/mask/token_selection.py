"""Masks in which every query token has chosen its own blocks of keys: union lists, and a bit per query row."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xsake._ground.buckets import power_of_two_at_least
from xsake._ground.device import on_host
from xsake._ground.integers import as_int32
from xsake.hads.mask.bitmaps import bit, distinct, words_of
from xsake.hads.mask.grid import Grid
from xsake.hads.mask.lists.chosen import sorted_lists
from xsake.hads.mask.lists.mask_lists import MaskLists
from xsake.hads.mask.lists.rows import ArrayT
from xsake.hads.mask.lists.with_bitmaps import with_bitmap_per_block, with_bitmaps
from xsake.hads.mask.token_function import Known, mask_of_tokens


def of_numbers(
    numbers: ArrayT, grid: Grid, *, capacity: int | None, transpose: bool, density_hint: float | None
) -> MaskLists:
    """The mask of what each token chose, `numbers` [b, t, h, n] as `numbers_that_count` gives them."""
    column, wrong = _columns(numbers, grid)
    given: dict[str, Any] = dict(transpose=transpose, density_hint=density_hint)
    if not isinstance(column, jax.core.Tracer):
        return _concrete(column, grid, capacity=capacity, **given)
    if capacity is None:
        # A row of blocks lists at most as many blocks as its tokens have chosen.
        per_row = np.minimum(grid.allowed_and_full()[0].sum(-1), grid.block_q * column.shape[-1])
        capacity = max(int(per_row.sum()), 1)
    if capacity < 1:
        raise ValueError(f"{capacity=} must be at least 1")
    lists = sorted_lists(column, grid, capacity, transpose) if _sorting_pays(column, grid) else None
    if lists is None:
        return _dense(column, grid, capacity=capacity, **given).poisoned(wrong.any((1, 3)))
    rows, columns = lists.rows, lists.columns
    mask = MaskLists.of_lists(rows[:3], columns and columns[:3], density_hint=density_hint, **dataclasses.asdict(grid))
    q_bitmap = columns and columns.bitmap
    mask = dataclasses.replace(mask, bitmaps=lists.bitmaps, kv_bitmap=rows.bitmap, q_bitmap=q_bitmap)
    return mask.poisoned(wrong.any((1, 3)))


def _concrete(column: np.ndarray, grid: Grid, **given: Any) -> MaskLists:
    words = _row_words(np, column, grid)
    active, whole, full = _active_and_full(words, grid)
    mask = MaskLists.of_active(active, full, grid, traced=False, **given)
    if not (active & ~whole).any():
        return mask
    ones = np.full((1, words.shape[-1]), 2**32 - 1, np.uint32)
    of_blocks = np.where(whole[..., None], ones, words).reshape(-1, words.shape[-1])
    table, number = distinct(np.concatenate([ones, np.where(active.reshape(-1, 1), of_blocks, ones)])[:, None])
    spare = power_of_two_at_least(len(table)) - len(table)  # so that new contents rarely compile anew
    table = np.pad(table, [(0, spare), (0, 0), (0, 0)])
    return with_bitmaps(mask, table[None, None], number[1:].reshape(active.shape))


def _sorting_pays(column: ArrayT, grid: Grid) -> bool:
    """Whether fewer numbers were chosen than there are blocks, per head."""
    return column.shape[1] * column.shape[3] < grid.num_q * grid.num_kv


def _dense(column: ArrayT, grid: Grid, **given: Any) -> MaskLists:
    """A traced mask from arrays with an entry for each block: where these are few, or keys too large to be sorted."""
    words = _row_words(jnp, column, grid)
    active, _, full = _active_and_full(words, grid)
    mask = MaskLists.of_active(active, full, grid, traced=True, **given)
    return with_bitmap_per_block(mask, words.reshape(*words.shape[:2], grid.num_q * grid.num_kv, 1, words.shape[-1]))


def with_window(numbers: ArrayT, window: int, *, block_q: int, block_kv: int) -> MaskLists:
    """A causal mask of what each token chose, as `of_numbers`, and of the last `window` tokens, its own included."""
    q_len = numbers.shape[1]
    grid = Grid.of(block_q, block_kv, q_len, q_len, True, None)
    column, wrong = _columns(numbers, grid)
    words = _row_words(jnp if isinstance(column, jax.core.Tracer) else np, column, grid)

    def attends(b: Any, h: Any, q: Any, k: Any) -> Any:
        row = q % block_q
        word = words[b, h, q // block_q, k // block_kv, row // 32]
        return bit(word, row) | (q - k < window)

    i, j = np.arange(grid.num_q)[:, None] * block_q, np.arange(grid.num_kv)[None, :] * block_kv
    near = (i - (j + block_kv - 1) < window)[None, None], (i + block_q - 1 - j < window)[None, None]
    every_row = _every_row(grid)[None, None]
    whole = ((words & every_row) == every_row).all(-1)
    known = Known((words != 0).any(-1) | near[0], whole | near[1])
    mask = mask_of_tokens(grid, attends, batch=words.shape[0], heads=words.shape[1], known=known)
    return mask.poisoned(wrong.any((1, 3))) if isinstance(words, jax.core.Tracer) else mask


def _columns(indices: ArrayT, grid: Grid) -> tuple[ArrayT, ArrayT]:
    """(the numbers, nK where nothing is chosen; which are out of range), [b, t, h, n] each."""
    grid.check_blocks()
    wrong = (indices < -1) | (indices >= grid.num_kv)
    traced = isinstance(indices, jax.core.Tracer)
    if not traced and wrong.any():
        raise ValueError(
            f"block_indices must be -1 (none) or in [0, {grid.num_kv}); got {indices[wrong][:4].tolist()} "
            f"at {np.argwhere(wrong)[:4].tolist()}"
        )
    xp: Any = jnp if traced else np
    return xp.where(wrong | (indices < 0), grid.num_kv, indices), wrong


def numbers_that_count(block_indices: Any, block_counts: Any, tokens: int) -> ArrayT:
    """The numbers i32[batch, tokens, heads, blocks], checked, and -1 for those past a token's count; on the host unless
    one of the two is traced.
    """
    traced = any(isinstance(x, jax.core.Tracer) for x in (block_indices, block_counts))
    xp: Any = jnp if traced else np
    to_array = jnp.asarray if traced else on_host
    indices = to_array(block_indices)
    if not np.issubdtype(indices.dtype, np.integer):
        raise TypeError(f"block_indices must be integers, got dtype {indices.dtype}")
    if indices.ndim != 4 or indices.shape[1] != tokens or 0 in indices.shape:
        raise ValueError(f"block_indices must be [batch, tokens, heads, blocks]; got shape {tuple(indices.shape)}")
    indices = as_int32("block_indices", indices)
    if block_counts is None:
        return indices
    counts = to_array(block_counts)
    if not np.issubdtype(counts.dtype, np.integer):
        raise TypeError(f"block_counts must be integers, got dtype {counts.dtype}")
    if counts.ndim and tuple(counts.shape) != tuple(indices.shape[:3]):
        raise ValueError(
            f"block_counts must be an int or {list(indices.shape[:3])}, one number per token and head; got shape "
            f"{tuple(counts.shape)}"
        )
    counts = as_int32("block_counts", counts)
    position = np.arange(indices.shape[-1], dtype=np.int32)[None, None, None]
    return xp.where(position < xp.broadcast_to(counts, indices.shape[:3])[..., None], indices, -1)


def _row_words(xp: Any, column: ArrayT, grid: Grid) -> ArrayT:
    """uint32[b, h, nQ, nK, words]: which rows of a block of queries chose each block of keys.

    `column` [b, t, h, n] is nK where nothing is chosen. A word is the sum of its bits, so that each may come once: a
    number that a token repeats is taken out.
    """
    ordered = xp.sort(column, axis=-1)
    again = xp.concatenate([xp.zeros_like(ordered[..., :1], dtype=bool), ordered[..., 1:] == ordered[..., :-1]], -1)
    column = xp.where(again, grid.num_kv, ordered)
    b, t, h, _ = np.ogrid[tuple(map(slice, column.shape))]
    row = t % grid.block_q
    bit = np.broadcast_to(np.uint32(1) << (row % 32).astype(np.uint32), column.shape)
    shape = (column.shape[0], column.shape[2], grid.num_q, grid.num_kv + 1, words_of(grid.block_q))
    where = (b, h, t // grid.block_q, column, row // 32)
    if xp is not np:
        return jnp.zeros(shape, jnp.uint32).at[where].add(bit)[..., :-1, :]
    words = np.zeros(shape, np.uint32)
    np.add.at(words, where, bit)
    return words[..., :-1, :]


def _active_and_full(words: ArrayT, grid: Grid) -> tuple[ArrayT, ArrayT, ArrayT]:
    """(blocks that are listed, blocks that all rows chose, those of them that need no test of elements)."""
    allowed, full = grid.allowed_and_full()
    every_row = _every_row(grid)[None, None]
    whole = ((words & every_row) == every_row).all(-1)
    return (words != 0).any(-1) & allowed[None, None], whole, whole & full[None, None]


def _every_row(grid: Grid) -> np.ndarray:
    """uint32[nQ, 1, words]: the bits of all rows that hold a query."""
    rows = np.minimum(grid.q_len - np.arange(grid.num_q) * grid.block_q, grid.block_q)
    word = np.arange(words_of(grid.block_q))
    bits = np.clip(rows[:, None] - 32 * word[None], 0, 32).astype(np.uint64)
    return ((np.uint64(1) << bits) - np.uint64(1)).astype(np.uint32)[:, None]
