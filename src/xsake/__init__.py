"""XSAKE: block-sparse attention for JAX, one mask contract and interchangeable backends."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xsake import autotune, tuning_db
    from xsake._op import attention
    from xsake._registry import implementations
    from xsake._selection.moba import moba_attention
    from xsake._selection.native_sparse import native_sparse_attention
    from xsake._selection.selected import selected_attention
    from xsake._sharded import sharded_attention, unzigzag, zigzag
    from xsake._trace import interpret
    from xsake.hads.mask import patterns
    from xsake.hads.mask.block_mask import BlockMask

__version__ = "0.1.0"

_PUBLIC = {
    "BlockMask": "xsake.hads.mask.block_mask",
    "attention": "xsake._op",
    "autotune": "xsake.autotune",
    "implementations": "xsake._registry",
    "interpret": "xsake._trace",
    "moba_attention": "xsake._selection.moba",
    "native_sparse_attention": "xsake._selection.native_sparse",
    "patterns": "xsake.hads.mask.patterns",
    "selected_attention": "xsake._selection.selected",
    "sharded_attention": "xsake._sharded",
    "tuning_db": "xsake.tuning_db",
    "unzigzag": "xsake._sharded",
    "zigzag": "xsake._sharded",
}

__all__ = [
    "BlockMask",
    "attention",
    "autotune",
    "implementations",
    "interpret",
    "moba_attention",
    "native_sparse_attention",
    "patterns",
    "selected_attention",
    "sharded_attention",
    "tuning_db",
    "unzigzag",
    "zigzag",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `import xsake` stays light."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'xsake' has no attribute {name!r}")
    module = importlib.import_module(_PUBLIC[name])
    globals()[name] = value = module if _PUBLIC[name].endswith(f".{name}") else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
