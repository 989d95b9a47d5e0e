"""The contract (BlockMask) and its producers: fixed patterns, and HADS, which gives every head the blocks it needs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from xsake.hads.block_mask import BlockMask, density_bucket

if TYPE_CHECKING:
    from xsake.hads.budgets import head_counts, layer_counts
    from xsake.hads.calibration import calibrate
    from xsake.hads.mask_function import HadsMask, recalibration
    from xsake.hads.profile import HadsProfile
    from xsake.hads.selection import select

_PUBLIC = {
    "HadsMask": "xsake.hads.mask_function",
    "HadsProfile": "xsake.hads.profile",
    "calibrate": "xsake.hads.calibration",
    "head_counts": "xsake.hads.budgets",
    "layer_counts": "xsake.hads.budgets",
    "recalibration": "xsake.hads.mask_function",
    "select": "xsake.hads.selection",
}

__all__ = [
    "BlockMask",
    "HadsMask",
    "HadsProfile",
    "calibrate",
    "density_bucket",
    "head_counts",
    "layer_counts",
    "recalibration",
    "select",
]


def __getattr__(name: str) -> Any:
    """Imported when first used: a mask needs none of it."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'xsake.hads' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
