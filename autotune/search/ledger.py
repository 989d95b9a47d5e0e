"""The results of a run, each written to the database as soon as it is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from xsake import tuning_db
from xsake._measure.environment import Facts
from xsake.autotune.problem import Part, Problem, StudyPlan, label
from xsake.autotune.result import Result
from xsake.autotune.write import writer
from xsake.tuning_db import Key

_HINTS = 3


@runtime_checkable
class Observer(Protocol):
    """Is told what the tuner does, and the result of every study."""

    def doing(self, what: str, share: float) -> None:
        """The step `what` begins; `share`, from 0 to 1, is the part of the whole work that is done."""

    def done(self, result: Result) -> None: ...


class Ledger:
    """The latest result of every study. Entries go to the file of the device kind in `folder`."""

    def __init__(self, facts: Facts, folder: Path, seed: int, observer: Observer):
        self.facts, self._seed, self._observer = facts, seed, observer
        self.path = folder / tuning_db.file_name(facts.device_kind)
        writer.check_writable(self.path)
        self._results: dict[tuple[Problem, Key], Result] = {}

    @property
    def results(self) -> list[Result]:
        return list(self._results.values())

    @property
    def has_written(self) -> bool:
        return any(result.config is not None for result in self.results)

    @property
    def is_disturbed(self) -> bool:
        """Whether a result was not written because the machine was busy."""
        return any(result.disturbed for result in self.results)

    @property
    def trials(self) -> int:
        return sum(len(result.tried) for result in self.results)

    def result(self, problem: Problem, plan: StudyPlan) -> Result | None:
        return self._results.get((problem, plan.key))

    def write(self, problem: Problem, result: Result, conditions: dict[str, Any]) -> None:
        if result.config is not None:
            facts = self.facts
            entry = result.entry(seed=self._seed, environment=facts.environment_id, conditions=conditions)
            writer.merge(self.path, facts.device_kind, [entry], {facts.environment_id: facts.environment})
        self._results[problem, result.plan.key] = result

    def announce(self, problem: Problem, plan: StudyPlan) -> None:
        self._observer.done(self._results[problem, plan.key])

    def hints(self, plan: StudyPlan) -> list[Part]:
        """Configurations that won elsewhere: in the databases, then in this run, the latest first."""
        found = tuning_db.find(self.facts.device_kind, plan.key)
        hints = [dict(found.entry.config)] if found else []
        for result in reversed(self.results):
            key = result.plan.key
            is_alike = (key.implementation, key.direction) == (plan.key.implementation, plan.key.direction)
            if result.config is not None and is_alike:
                hints.append(result.config)
        feasible = {label(part) for part in plan.parts}
        return list({label(hint): hint for hint in hints if label(hint) in feasible}.values())[:_HINTS]
