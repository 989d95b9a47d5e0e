"""XSAKE: block-sparse attention for JAX, one mask contract and interchangeable backends."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xsake import autotune, backend, compat, hads, model, testing, tuning_db
    from xsake._ground.trace import interpret
    from xsake._op.attention import attention
    from xsake._op.ragged import ragged_attention
    from xsake._op.registry import implementations, register_backend
    from xsake._selection.moba import moba_attention
    from xsake._selection.native_sparse import native_sparse_attention
    from xsake._selection.selected import selected_attention
    from xsake._sequence.sharded import sharded_attention, unzigzag, zigzag
    from xsake.hads.mask import patterns
    from xsake.hads.mask.block_mask import BlockMask

__version__ = "0.1.0"

_MODULES = {
    "autotune": "xsake.autotune",
    "backend": "xsake.backend",
    "compat": "xsake.compat",
    "hads": "xsake.hads",
    "model": "xsake.model",
    "patterns": "xsake.hads.mask.patterns",
    "testing": "xsake.testing",
    "torch": "xsake.torch",
    "tuning_db": "xsake.tuning_db",
}
_NAMES = {
    "BlockMask": "xsake.hads.mask.block_mask",
    "attention": "xsake._op.attention",
    "implementations": "xsake._op.registry",
    "interpret": "xsake._ground.trace",
    "moba_attention": "xsake._selection.moba",
    "native_sparse_attention": "xsake._selection.native_sparse",
    "ragged_attention": "xsake._op.ragged",
    "register_backend": "xsake._op.registry",
    "selected_attention": "xsake._selection.selected",
    "sharded_attention": "xsake._sequence.sharded",
    "unzigzag": "xsake._sequence.sharded",
    "zigzag": "xsake._sequence.sharded",
}

__all__ = [
    "BlockMask",
    "attention",
    "autotune",
    "backend",
    "compat",
    "hads",
    "implementations",
    "interpret",
    "moba_attention",
    "model",
    "native_sparse_attention",
    "patterns",
    "ragged_attention",
    "register_backend",
    "selected_attention",
    "sharded_attention",
    "testing",
    "tuning_db",
    "unzigzag",
    "zigzag",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `import xsake` stays light."""
    if name in _MODULES:
        value: Any = importlib.import_module(_MODULES[name])
    elif name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
    else:
        raise AttributeError(f"module 'xsake' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES, *_NAMES])
