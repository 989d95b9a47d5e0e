"""The tuner's view of the worker: one open problem, opened again after every restart of the worker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import monotonic
from typing import Any

from xsake._measure.closeness import Correctness
from xsake._measure.isolation import Caller, Died, Failed, Hung
from xsake.autotune.measure.contest import COMPILERS, Round
from xsake.autotune.problem import Part, Problem, StudyPlan, label

# Limits of the other requests, as multiples of the limit of a race.
_OPEN = 4.0
_COMPILE = 2.0
_VERIFY = 5.0  # the oracle is dense

_STEPS = {
    "open": "preparing the data and the oracle",
    "compile": "compiling",
    "race": "a race",
    "verify": "the check against the oracle",
}


class OutOfTime(Exception):
    """The budget and its grace ended before the request did."""


class Referee:
    """Opens a problem, and again in every new worker. A race of more than `limit` seconds counts as hanging.

    No request lasts beyond `end` (monotonic clock), the end of the budget with its grace: `OutOfTime`.
    """

    def __init__(self, worker: Caller, problem: Problem, limit: float, end: float = math.inf):
        self._worker, self._problem, self._limit, self._end = worker, problem, limit, end
        self.check_seconds = 0.0
        self.plans: list[StudyPlan] = self._open()

    def _open(self) -> list[StudyPlan]:
        plans = self._call("open", self._problem, limit=_OPEN * self._limit)
        self._opened, self._compiled = self._worker.restarts, set[tuple[str, str]]()
        return plans

    def _ask(self, method: str, *arguments: Any, limit: float) -> Any:
        if self._worker.restarts != self._opened:
            self._open()
        return self._call(method, *arguments, limit=limit)

    def _call(self, method: str, *arguments: Any, limit: float) -> Any:
        left = self._end - monotonic()
        if left <= 0:
            raise OutOfTime(f"{_STEPS[method]} did not begin")
        try:
            return self._worker.call(method, *arguments, limit=min(limit, left))
        except Hung as hung:
            if left < limit:
                raise OutOfTime(f"{_STEPS[method]} did not end") from hung
            raise

    def compile(self, direction: str, parts: Sequence[Part]) -> dict[str, str]:
        """Compile the parts. Returns errors by label; parts without an error are ready."""
        limit = _COMPILE * self._limit * math.ceil(len(parts) / COMPILERS)
        try:
            told = self._ask("compile", direction, list(parts), limit=limit)
        except (Died, Hung) as failure:
            if len(parts) == 1:
                return {label(parts[0]): str(failure)}
            # One of the parts ended the process: compile them one by one to find out which.
            return {name: why for part in parts for name, why in self.compile(direction, [part]).items()}
        except Failed as failure:
            return {label(part): str(failure) for part in parts}
        broken = {label(part): why for part, why in zip(parts, told, strict=True) if why}
        self._compiled |= {(direction, label(part)) for part in parts if label(part) not in broken}
        return broken

    def race(self, plan: StudyPlan, parts: Sequence[Part]) -> list[Round]:
        """One round at each density of the plan. Raises `Failed`."""
        self._make_ready(plan.key.direction, parts)
        return [self._ask("race", plan.key.direction, d, list(parts), limit=self._limit) for d in plan.densities]

    def verify(self, plan: StudyPlan, part: Part) -> Correctness:
        """Check the part's results at the first density of the plan. Raises `Failed`."""
        self._make_ready(plan.key.direction, [part])
        start = monotonic()
        try:
            return self._ask("verify", plan.key.direction, plan.densities[0], part, limit=_VERIFY * self._limit)
        finally:
            self.check_seconds += monotonic() - start

    def _make_ready(self, direction: str, parts: Sequence[Part]) -> None:
        """Compile the parts that the worker has not compiled yet; a new worker has compiled none. Raises `Failed`."""
        known = self._compiled if self._worker.restarts == self._opened else set()
        missing = [part for part in parts if (direction, label(part)) not in known]
        if missing and (broken := self.compile(direction, missing)):
            raise Failed(next(iter(broken.values())))
