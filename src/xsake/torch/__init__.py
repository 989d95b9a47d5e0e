"""xsake in models of transformers on torch: `register()`, then `attn_implementation="xsake"`."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import TYPE_CHECKING, Any

import jax
from jax._src import xla_bridge

from xsake._ground.extras import missing

if TYPE_CHECKING:
    from xsake.torch.of_tensors import attention
    from xsake.torch.sparse import hads
    from xsake.torch.transformers import register

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


def _leave_memory_to_torch() -> None:
    """At its first use JAX takes most of a GPU's memory, unless it is told not to."""
    if "XLA_PYTHON_CLIENT_PREALLOCATE" in os.environ:
        return
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if xla_bridge.backends_are_initialized() and jax.default_backend() == "gpu":
        warnings.warn(
            "JAX was used before xsake.torch was imported, and holds most of the GPU's memory, which torch will lack: "
            "import xsake.torch first, or set XLA_PYTHON_CLIENT_PREALLOCATE=false",
            RuntimeWarning,
            stacklevel=2,
        )


_leave_memory_to_torch()
