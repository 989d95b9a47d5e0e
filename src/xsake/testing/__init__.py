"""The contract of `xsake.attention` as checks for any backend: a float64 reference, cases, and tolerances.

`xsake check` runs them from the command line, and pytest in a package of kernels:

    import pytest
    from xsake.testing import assert_holds, checks_of, target_of

    TARGET = target_of("my_kernel")

    @pytest.mark.parametrize("check", checks_of(TARGET, quick=True), ids=lambda check: check.title)
    def test_contract(check):
        assert_holds(TARGET, check)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xsake.testing.checks import CHECKS, Check, checks_of
    from xsake.testing.target import Target, target_of
    from xsake.testing.verdict import assert_holds

_NAMES = {
    "assert_holds": "xsake.testing.verdict",
    "CHECKS": "xsake.testing.checks",
    "Check": "xsake.testing.checks",
    "Target": "xsake.testing.target",
    "checks_of": "xsake.testing.checks",
    "target_of": "xsake.testing.target",
}

__all__ = ["CHECKS", "Check", "Target", "assert_holds", "checks_of", "target_of"]


def __getattr__(name: str) -> Any:
    """Names are imported when first asked for: the reference alone needs no JAX."""
    if name not in _NAMES:
        raise AttributeError(f"module 'xsake.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
