"""A hash of the code that a race of sparse and dense attention timed."""

from __future__ import annotations

import hashlib
import importlib
from functools import cache

from xsake._op import tuned
from xsake._op.kernel_hash import kernel_hash

_CHOOSING = ("select", "chunk", "step.mask")  # of `hads.selection`, with what they import in `hads`


@cache
def code_hash(implementation: str) -> str:
    """The hash of an implementation's kernels and of the code that chooses blocks."""
    choosing = [kernel_hash(importlib.import_module(f"xsake.hads.selection.{name}")) for name in _CHOOSING]
    return hashlib.sha256(" ".join([tuned.kernel_hash(implementation), *choosing]).encode()).hexdigest()[:16]
