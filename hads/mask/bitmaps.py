"""Bitmaps: which elements of a block attend, packed along its query rows into words of 32 bits.

Rows lie in words, so that a bitmap whose columns are all alike (a bit per query row) is the same thing with one column.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ArrayT = Any  # numpy outside jit, jax inside


def words_of(block_q: int) -> int:
    return -(-block_q // 32)


def pack(xp: Any, elements: ArrayT) -> ArrayT:
    """bool[..., rows, columns] to uint32[..., columns, words]: bit r % 32 of word r // 32 is row r."""
    by_column = elements.swapaxes(-1, -2)
    rows = by_column.shape[-1]
    words = words_of(rows)
    padded = xp.pad(by_column, [(0, 0)] * (by_column.ndim - 1) + [(0, 32 * words - rows)])
    parts = padded.reshape(*by_column.shape[:-1], words, 32).astype(np.uint32)
    return (parts << np.arange(32, dtype=np.uint32).reshape((1,) * (parts.ndim - 1) + (32,))).sum(-1, dtype=np.uint32)


def unpack(xp: Any, bitmaps: ArrayT, block_q: int, block_kv: int) -> ArrayT:
    """bool[..., block_q, block_kv] from uint32[..., block_kv or 1, words]."""
    place = np.arange(32, dtype=np.uint32).reshape((1,) * bitmaps.ndim + (32,))
    bits = ((bitmaps[..., None] >> place) & np.uint32(1)).astype(bool)
    bits = bits.reshape(*bitmaps.shape[:-1], -1)[..., :block_q].swapaxes(-1, -2)
    return xp.broadcast_to(bits, (*bits.shape[:-1], block_kv))


def bit(word: ArrayT, row: ArrayT) -> ArrayT:
    """Whether a row attends, by the word that has its bit."""
    return ((word >> (row % 32).astype(np.uint32)) & np.uint32(1)) != 0


def distinct(bitmaps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the distinct ones of uint32[n, columns, words], the number of each among them)."""
    flat = np.ascontiguousarray(bitmaps).reshape(len(bitmaps), -1)
    as_bytes = flat.view(np.dtype((np.void, flat.shape[1] * 4)))[:, 0]
    _, first, number = np.unique(as_bytes, return_index=True, return_inverse=True)
    return bitmaps[first], number.reshape(-1).astype(np.int32)
