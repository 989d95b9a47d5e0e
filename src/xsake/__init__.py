"""XSAKE: block-sparse attention for JAX, one mask contract and interchangeable backends."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xsake._backend import interpret
    from xsake._op import attention
    from xsake._registry import implementations
    from xsake.hads import patterns
    from xsake.hads.block_mask import BlockMask

__version__ = "0.1.0"

_PUBLIC = {
    "BlockMask": "xsake.hads.block_mask",
    "attention": "xsake._op",
    "implementations": "xsake._registry",
    "interpret": "xsake._backend",
    "patterns": "xsake.hads",
}

__all__ = ["BlockMask", "attention", "implementations", "interpret", "patterns"]


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `import xsake` stays light."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'xsake' has no attribute {name!r}")
    value = (
        importlib.import_module("xsake.hads.patterns")
        if name == "patterns"
        else getattr(importlib.import_module(_PUBLIC[name]), name)
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
