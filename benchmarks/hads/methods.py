"""Registers the study's rivals and ablations with xsake's evaluation, and names the groups that tables show."""

from __future__ import annotations

from benchmarks.hads.ablations import ABLATIONS as _ABLATIONS
from benchmarks.hads.ablations import BY_PRIORITY as _BY_PRIORITY
from benchmarks.hads.kascade import kascade
from benchmarks.hads.minference import minference
from benchmarks.hads.patterns import PATTERNS
from benchmarks.hads.probes import PROBES
from benchmarks.hads.rivals import METHODS as _RIVALS
from benchmarks.hads.v1 import METHODS as _V1
from benchmarks.hads.x_heads import METHODS as _X_HEADS
from xsake.hads.study.methods.registry import Method, register, register_in_both_forms, register_rival
from xsake.hads.study.methods.shipped import GROUPS, METHODS

for _rival in (*PATTERNS, *_RIVALS, *_X_HEADS):
    register_rival(_rival.__name__, _rival)
for _rival in (minference, kascade):
    register_in_both_forms(_rival.__name__, _rival)
for _name, _method in _ABLATIONS.items():
    register(_name, _method, group="ablations")
for _name, _program in PROBES.items():
    register(_name, Method(_program), group="probes")
for _own in (*_BY_PRIORITY, *_V1):  # ours, with and without forced blocks: no rivals
    register_rival(_own.__name__, _own, groups=("ablations", "ablations"))

OURS, ORACLES, ABLATIONS = (tuple(GROUPS[group]) for group in ("ours", "oracles", "ablations"))
RIVALS = tuple(GROUPS["rivals"])
STRENGTHENED = tuple(GROUPS["forced"])  # the rivals with HADS's forced blocks

# Records of rivals of another version are not continued. 2: every rival keeps the diagonal block, and `sparge` has the
# similarity threshold of its public code.
RIVALS_VERSION = 2

__all__ = ["ABLATIONS", "METHODS", "ORACLES", "OURS", "RIVALS", "RIVALS_VERSION", "STRENGTHENED"]
