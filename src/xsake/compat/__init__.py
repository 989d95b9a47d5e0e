"""The names and signatures of other libraries, on top of XSAKE: `xsake.compat.ejkernel`, `easydel` and `flex`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xsake.compat import easydel, ejkernel, flex

__all__ = ["easydel", "ejkernel", "flex"]


def __getattr__(name: str) -> Any:
    """Import a library's names when they are first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'xsake.compat' has no attribute {name!r}")
    return importlib.import_module(f"xsake.compat.{name}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
