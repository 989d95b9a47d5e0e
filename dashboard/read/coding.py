"""Masses and masks as short texts: a byte or a bit per causal block, in base64.

Blocks are numbered row by row over the lower triangle: block (row i, column j <= i) is number i (i + 1) / 2 + j.
"""

from __future__ import annotations

import base64

import numpy as np

STEPS = 16  # per factor of 2


def lower_triangle(blocks: np.ndarray) -> np.ndarray:
    """[..., side, side] to [..., side * (side + 1) / 2]."""
    rows, columns = np.tril_indices(blocks.shape[-1])
    return blocks[..., rows, columns]


def full_square(values: np.ndarray) -> np.ndarray:
    """The inverse of `lower_triangle`; 0 where causality forbids.

    >>> full_square(np.array([1, 2, 3])).tolist()
    [[1, 0], [2, 3]]
    """
    side = round((np.sqrt(8 * values.shape[-1] + 1) - 1) / 2)
    square = np.zeros((*values.shape[:-1], side, side), values.dtype)
    rows, columns = np.tril_indices(side)
    square[..., rows, columns] = values
    return square


def encode_levels(values: np.ndarray) -> str:
    """Numbers from 0 to 1 of one head, a byte each: 0 is 0, and q > 0 is 2 ** ((q - 255) / 16)."""
    with np.errstate(divide="ignore"):
        levels = np.round(255 + STEPS * np.log2(np.asarray(values, np.float64)))
    return _text(np.clip(np.where(levels < 1, 0, levels), 0, 255).astype(np.uint8))


def decode_levels(text: str) -> np.ndarray:
    """
    >>> decode_levels(encode_levels(np.array([0.0, 1.0, 0.5]))).tolist()
    [0.0, 1.0, 0.5]
    """
    levels = np.frombuffer(base64.b64decode(text), np.uint8).astype(np.float64)
    return np.where(levels == 0, 0.0, 2.0 ** ((levels - 255) / STEPS))


def encode_mask(kept: np.ndarray) -> str:
    """Kept blocks of one head, a bit each, the first block in the highest bit of the first byte."""
    return _text(np.packbits(np.asarray(kept, bool)))


def decode_mask(text: str, blocks: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=blocks).astype(bool)


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()
