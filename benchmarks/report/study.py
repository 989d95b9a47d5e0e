"""The recorded studies of HADS (`python -m benchmarks.hads`): their rows, and methods by rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from benchmarks.hads.methods import RIVALS, STRENGTHENED
from benchmarks.report.shared_texts import Shared, shared
from benchmarks.report.words import Row, Run
from xsake._ground.words import model

SHOWN = (0.1, 0.2, 0.43)  # of the budgets of SmolLM2's studies
MANY = 20  # a study of more methods ran each on its own texts


class Study:
    """`rows` are its results at the budgets that were compared; `by` has them by method and budget."""

    def __init__(self, run: Run):
        self.run, self.about = run, run.content["about"]
        self.name = run.name.removeprefix("hads/summary-")
        every = run.content["methods"]
        self.budgets = sorted({r["budget"] for r in every if r["method"] == "hads"})
        self.rows = [r for r in every if r["layers"] == "profile" and r["budget"] in self.budgets]
        self.by = {(r["method"], r["budget"]): r for r in self.rows}
        self.methods = {r["method"] for r in self.rows}

    @property
    def tasks(self) -> list[Row]:
        return self.run.content["tasks"]

    def title(self) -> str:
        about = self.about
        return f"{model(about['model'])}, {about['length']} tokens, blocks of {about['block']}"

    def rivals(self, *, forced: bool) -> list[str]:
        return ranked(self.rows, STRENGTHENED if forced else RIVALS)

    def compared(self) -> list[Row]:
        return [r for r in self.rows if r["method"] in RIVALS or r["method"] in STRENGTHENED]

    def shared(self) -> Shared | None:
        """The methods of a small study on the texts that all have read; None if all have read the same."""
        return shared(self.name) if len(self.methods) <= MANY else None


def studies() -> list[Study]:
    """The longest texts first, and the smallest blocks."""
    found = [Study(run) for run in Run.load_all("hads/summary-")]
    return sorted(found, key=lambda study: (-study.about["length"], study.about["block"]))


def study(model: str, length: int, block: int = 64) -> Study:
    wanted = (model, length, block)
    return next(s for s in studies() if tuple(s.about[name] for name in ("model", "length", "block")) == wanted)


def ranked(rows: Sequence[Row], among: Collection[str]) -> list[str]:
    """Best first, by the mean of the logarithm of KL over the budgets that all of these methods have."""
    logs: dict[str, dict[float, float]] = {}
    for r in rows:
        if r["method"] in among:
            logs.setdefault(r["method"], {})[r["budget"]] = float(np.log(r["kl"]))
    common = sorted(set.intersection(*map(set, logs.values()))) if logs else []
    return sorted(logs, key=lambda name: float(np.mean([logs[name][b] for b in common])))


def is_below(difference: dict[str, Any] | None) -> bool:
    """Whether the whole interval of a difference is below 0."""
    return difference is not None and difference["high"] is not None and difference["high"] < 0


def over_best(study: Study, budget: float) -> float:
    """HADS's KL over the KL of the best rival, on the texts that both have read."""
    rows = [r for r in study.compared() if r["budget"] == budget]
    return max(1 + r["against"]["mean"] / r["kl"] for r in rows)
