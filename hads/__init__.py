"""The contract (BlockMask) and its producers: fixed patterns, and HADS, which gives every head the blocks it needs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from xsake._ground.buckets import density_bucket
from xsake.hads.mask.block_mask import BlockMask

if TYPE_CHECKING:
    from xsake.hads.attention.attention import Attention, explain
    from xsake.hads.attention.policy import Policy
    from xsake.hads.calibration.calibrate import calibrate
    from xsake.hads.calibration.layerwise import Layered
    from xsake.hads.calibration.recalibration import recalibration
    from xsake.hads.profile.budgets import chunk_counts, head_counts, layer_counts
    from xsake.hads.profile.profile import HadsProfile
    from xsake.hads.selection.chunk import LayerWeights, select_chunk
    from xsake.hads.selection.mask_function import HadsMask
    from xsake.hads.selection.pooled_keys import PooledKeys
    from xsake.hads.selection.select import select

_PUBLIC = {
    "Attention": "xsake.hads.attention.attention",
    "HadsMask": "xsake.hads.selection.mask_function",
    "HadsProfile": "xsake.hads.profile.profile",
    "LayerWeights": "xsake.hads.selection.chunk",
    "Layered": "xsake.hads.calibration.layerwise",
    "Policy": "xsake.hads.attention.policy",
    "PooledKeys": "xsake.hads.selection.pooled_keys",
    "calibrate": "xsake.hads.calibration.calibrate",
    "chunk_counts": "xsake.hads.profile.budgets",
    "explain": "xsake.hads.attention.attention",
    "head_counts": "xsake.hads.profile.budgets",
    "layer_counts": "xsake.hads.profile.budgets",
    "recalibration": "xsake.hads.calibration.recalibration",
    "select": "xsake.hads.selection.select",
    "select_chunk": "xsake.hads.selection.chunk",
}

__all__ = [
    "Attention",
    "BlockMask",
    "HadsMask",
    "HadsProfile",
    "LayerWeights",
    "Layered",
    "Policy",
    "PooledKeys",
    "calibrate",
    "chunk_counts",
    "density_bucket",
    "explain",
    "head_counts",
    "layer_counts",
    "recalibration",
    "select",
    "select_chunk",
]


def __getattr__(name: str) -> Any:
    """Import a part of HADS when it is first asked for: a mask alone needs none of them."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'xsake.hads' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
