"""A BlockMask as text: one small picture per head."""

from __future__ import annotations

import numpy as np

from xsake.hads.mask.lists.mask_lists import MaskLists

MAX_SIDE = 32
MAX_PICTURES = 8
WIDTH = 110
SHADES = "·░▒▓█"


def draw(mask: MaskLists) -> str:
    """The heads' pictures side by side. Each character is a cell of one or more blocks: `█` if all of them are active,
    `·` if none, a shade between if some. A block with a bitmap counts by the share of its bits."""
    try:
        if mask.overflowed().any():
            return f"{mask!r} that overflowed its capacity, or names blocks out of range"
        blocks = np.asarray(mask.to_blocks()) * _shares(mask)
    except Exception:  # traced, or a tree of specs: there are no contents to draw
        return repr(mask)
    pictures: list[list[str]] = []
    for b in range(mask.batch):
        for h in range(mask.heads):
            if len(pictures) < MAX_PICTURES:
                title = f"head {h}" if mask.batch == 1 else f"batch {b} head {h}"
                density = float(np.asarray(mask.density(per_head=True))[b, h])
                pictures.append([f"{title}  {density:.1%}", *_lines(blocks[b, h])])
    left_out = mask.batch * mask.heads - len(pictures)
    more = [f"... and {left_out} more"] if left_out else []
    head = f"{mask!r} density {float(mask.density()):.1%}"
    return "\n".join([head, *_side_by_side(pictures), *more])


def _shares(mask: MaskLists) -> np.ndarray:
    """float[b | 1, h | 1, nQ, nK]: the share of bits that are set in the bitmap of each listed block."""
    if mask.bitmaps is None:
        return np.ones((1, 1, 1, 1))
    bitmaps, numbers = mask.read(mask.bitmaps), mask.read(mask.kv_bitmap)
    size = mask.block_q * bitmaps.shape[3]
    set_ = np.minimum(np.bitwise_count(bitmaps).sum((-2, -1)), size) / size
    b, h = (x[..., None] for x in np.ogrid[: mask.batch, : mask.heads])
    of_slots = set_[np.minimum(b, set_.shape[0] - 1), np.minimum(h, set_.shape[1] - 1), numbers]
    return mask.by_block(of_slots, 0.0)


def _lines(blocks: np.ndarray) -> list[str]:
    return ["".join(SHADES[_shade(x)] for x in row) for row in _pool(blocks)]


def _shade(share: float) -> int:
    inner = len(SHADES) - 2
    return 0 if share == 0 else len(SHADES) - 1 if share == 1 else 1 + min(int(share * inner), inner - 1)


def _pool(blocks: np.ndarray) -> np.ndarray:
    """Means over cells, so that no side is longer than MAX_SIDE."""
    for axis in (0, 1):
        size = blocks.shape[axis]
        starts = np.unique(np.linspace(0, size, min(size, MAX_SIDE), endpoint=False).astype(int))
        lengths = np.diff(np.append(starts, size))
        blocks = np.add.reduceat(blocks.astype(float), starts, axis) / np.expand_dims(lengths, 1 - axis)
    return blocks


def _side_by_side(pictures: list[list[str]]) -> list[str]:
    lines: list[str] = []
    while pictures:
        width = [max(map(len, p)) + 2 for p in pictures]
        fit = max(1, int(np.searchsorted(np.cumsum(width), WIDTH, side="right")))
        group, pictures = pictures[:fit], pictures[fit:]
        for i in range(max(map(len, group))):
            lines.append(
                "".join((p[i] if i < len(p) else "").ljust(w) for p, w in zip(group, width, strict=False)).rstrip()
            )
    return lines
