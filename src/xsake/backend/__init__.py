"""The contract between the operation and a backend: what a backend gets, what it provides, and helpers for it.

All that a backend of another package imports is here. `CONTRACT` is the version, which a backend may state: names and
parameters keep their meaning while it stays, and new optional fields of `Call` are refused for backends that do not
name them in `HONOURS`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xsake._ground.fields import check_fields, flag, one_of, whole
    from xsake._ground.trace import interpreting, vary, varying_axes
    from xsake.backend.contract import CONTRACT, Backend, Call
    from xsake.backend.delta import DeltaParts
    from xsake.hads.mask.band import Band
    from xsake.hads.mask.block_mask import BlockMask

_NAMES = {
    "CONTRACT": "xsake.backend.contract",
    "Backend": "xsake.backend.contract",
    "Band": "xsake.hads.mask.band",
    "BlockMask": "xsake.hads.mask.block_mask",
    "Call": "xsake.backend.contract",
    "DeltaParts": "xsake.backend.delta",
    "check_fields": "xsake._ground.fields",
    "flag": "xsake._ground.fields",
    "interpreting": "xsake._ground.trace",
    "one_of": "xsake._ground.fields",
    "vary": "xsake._ground.trace",
    "varying_axes": "xsake._ground.trace",
    "whole": "xsake._ground.fields",
}

__all__ = [
    "CONTRACT",
    "Backend",
    "Band",
    "BlockMask",
    "Call",
    "DeltaParts",
    "check_fields",
    "flag",
    "interpreting",
    "one_of",
    "vary",
    "varying_axes",
    "whole",
]


def __getattr__(name: str) -> Any:
    """Names are imported when first asked for: the operation imports parts of this package alone."""
    if name not in _NAMES:
        raise AttributeError(f"module 'xsake.backend' has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
