"""Registers the study's rivals and ablations with xsake's evaluation, and names the groups that tables show."""

from __future__ import annotations

from benchmarks.hads.ablations import ABLATIONS as _ABLATIONS
from benchmarks.hads.patterns import PATTERNS
from benchmarks.hads.published import METHODS as _PUBLISHED
from benchmarks.hads.v1 import METHODS as _V1
from xsake.hads.study.methods import GROUPS, METHODS
from xsake.hads.study.registry import register, register_rival

for _rival in (*PATTERNS, *_PUBLISHED, *_V1):
    register_rival(_rival.__name__, _rival)
for _name, _method in _ABLATIONS.items():
    register(_name, _method, group="ablations")

OURS, ORACLES, ABLATIONS = (tuple(GROUPS[group]) for group in ("ours", "oracles", "ablations"))
PUBLISHED = tuple(GROUPS["published"])
STRENGTHENED = tuple(GROUPS["forced"])  # the published methods with HADS's forced blocks

__all__ = ["ABLATIONS", "METHODS", "ORACLES", "OURS", "PUBLISHED", "STRENGTHENED"]
