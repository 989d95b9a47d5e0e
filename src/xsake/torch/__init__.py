"""xsake in models of transformers on torch: `register()`, then `attn_implementation="xsake"`."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from xsake._ground.extras import missing

if TYPE_CHECKING:
    from xsake.torch.of_tensors import attention
    from xsake.torch.sparse import hads
    from xsake.torch.transformers import register

# JAX would take most of a GPU's memory at its first use, and leave torch none.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

_PUBLIC = {
    "attention": "xsake.torch.of_tensors",
    "hads": "xsake.torch.sparse",
    "register": "xsake.torch.transformers",
}

__all__ = ["attention", "hads", "register"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, and tell which extra brings torch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'xsake.torch' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(missing(error.name, "torch"), name=error.name) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
