"""The extras of the package, and the sentence that tells which of them brings a missing package."""

from __future__ import annotations

from typing import Literal

Extra = Literal["model", "dashboard", "tune", "test", "torch"]
_WHO: dict[Extra, str] = {
    "model": "models need it",
    "dashboard": "the dashboard needs it",
    "tune": "the tuner needs it",
    "test": "checks need it",
    "torch": "torch's models need it",
}


def missing(package: str | None, extra: Extra) -> str:
    """
    >>> missing("flax", "model")
    "flax is not installed; models need it: pip install 'xsake[model]' (in a checkout: pip install '.[model]')"
    """
    how = f"pip install 'xsake[{extra}]' (in a checkout: pip install '.[{extra}]')"
    return f"{package} is not installed; {_WHO[extra]}: {how}"
