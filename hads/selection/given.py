"""Given: the inputs of a layer's choice of blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

from xsake.hads.profile.estimator import Estimator


class Given(NamedTuple):
    """The inputs of a layer's choice of blocks; `kept` is the `count` or the `threshold` of `choose`."""

    query: Any
    key: Any
    estimator: Estimator
    sensitivity: Any
    burstiness: Any
    kept: dict[str, Any]
    segments: Any = None  # of packed documents; `kept` then holds the `table` and `there` of `Packed.counts`
