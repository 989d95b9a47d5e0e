"""A direction's search space as Optuna sees it: a categorical parameter for every field that varies."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import optuna

from xsake.autotune.search.problem import Part, label


class Space:
    """The feasible parts.

    Optuna draws from the product of the fields' values, which is larger: an infeasible draw is pruned, not measured.
    """

    def __init__(self, parts: Sequence[Part]):
        self.parts = {label(part): part for part in parts}
        first = parts[0]
        # dict.fromkeys would take True for 1.
        values = {name: {label({name: p[name]}): p[name] for p in parts} for name in first}
        self.choices = {name: list(v.values()) for name, v in values.items() if len(v) > 1}
        self._fixed = {name: first[name] for name in first if name not in self.choices}

    @property
    def hash(self) -> str:
        return hashlib.sha256("".join(sorted(self.parts)).encode()).hexdigest()[:8]

    def __contains__(self, part: Part) -> bool:
        return label(part) in self.parts

    def suggest(self, trial: optuna.Trial) -> Part:
        return self.part({name: trial.suggest_categorical(name, values) for name, values in self.choices.items()})

    def part(self, parameters: dict[str, Any]) -> Part:
        return self._fixed | {name: parameters[name] for name in self.choices}

    def parameters(self, part: Part) -> dict[str, Any]:
        return {name: part[name] for name in self.choices}
