"""Workloads, and the tuner that fills `xsake.tuning_db`. Importing this package does not import Optuna."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xsake.autotune.calls import record_calls

__all__ = ["record_calls"]


def __getattr__(name: str) -> Any:
    if name == "record_calls":
        from xsake.autotune.calls import record_calls

        return record_calls
    raise AttributeError(f"module 'xsake.autotune' has no attribute {name!r}")
