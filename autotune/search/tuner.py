"""The tuning loop: problems in turn, and the directions of each, within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import optuna

from xsake._measure.environment import Facts
from xsake._measure.interference import ATTEMPTS
from xsake._measure.isolation import Caller, Failed
from xsake.autotune.problem import Problem
from xsake.autotune.search.direction import Direction, Settings
from xsake.autotune.search.ledger import Ledger, Observer
from xsake.autotune.search.pace import Pace
from xsake.autotune.search.referee import OutOfTime, Referee
from xsake.autotune.search.study import Study

GRACE = 0.1  # of the budget: a step that runs at its end may last so much longer

_Needs = dict[str, float] | None  # seconds needed at least, by direction to tune; None: all directions


class Tuner:
    """Tunes on the device that `worker` holds; writes entries to the file of that device kind in `folder`."""

    def __init__(
        self,
        worker: Caller,
        storage: optuna.storages.BaseStorage,
        folder: Path,
        settings: Settings,
        observer: Observer,
    ):
        self._worker, self._storage, self._settings, self._observer = worker, storage, settings, observer
        self._start = monotonic()
        self._end = self._start + settings.budget
        self._latest = self._end + GRACE * settings.budget
        self.facts: Facts = worker.call("facts", limit=4 * settings.limit)
        self.ledger = Ledger(self.facts, folder, settings.seed, observer)
        self._compile_seconds = 0.0  # most seconds per configuration so far
        self._referees: list[Referee] = []
        self.unopened: list[str] = []  # problems that could not even be set up or leave no choice, and why
        self.cut_short: str | None = None  # the step that the budget's end cut short

    @property
    def least_budget(self) -> float | None:
        """If there was no time for a single entry, a budget in seconds to try next: twice the time spent."""
        now = monotonic()
        enough = self.ledger.has_written or self.ledger.is_disturbed or now < self._end
        return None if enough else 2 * (now - self._start)

    @property
    def check_seconds(self) -> float:
        """What the checks against the oracle took."""
        return sum(referee.check_seconds for referee in self._referees)

    def tune(self, problems: Sequence[Problem]) -> None:
        """Tune the problems, small ones first. Problems and their directions share the time evenly.

        Time that a direction does not use goes to the next ones, and time left at the end to unfinished directions and
        to races that were disturbed.
        """
        try:
            self._tune(problems)
        except OutOfTime as end:
            self.cut_short = str(end)
        self._observer.doing("done", 1.0)

    def _tune(self, problems: Sequence[Problem]) -> None:
        pending: list[tuple[Problem, _Needs]] = [(p, None) for p in sorted(problems, key=lambda p: p.workload.flops())]
        idle = 0  # rounds of turns without a new trial
        while pending and monotonic() < self._end and idle < (ATTEMPTS if self.ledger.is_disturbed else 1):
            trials, turns, pending = self.ledger.trials, pending, []
            for number, (problem, needs) in enumerate(turns):
                if unfinished := self._turn(problem, needs, number, len(turns)):
                    pending.append((problem, unfinished))
            idle = 0 if self.ledger.trials > trials else idle + 1

    def _turn(self, problem: Problem, needs: _Needs, number: int, turns: int) -> dict[str, float]:
        """Tune a problem in turn `number` of `turns`. Returns the seconds that its unfinished directions need."""
        start = monotonic()
        if needs is not None:
            needs = {direction: least for direction, least in needs.items() if least < self._end - start}
        if start >= self._end or needs == {}:
            return {}
        name = f"{problem.workload.name}, block {problem.workload.block}"
        try:
            referee = Referee(self._worker, problem, self._settings.limit, self._latest)
        except Failed as failure:
            self.unopened.append(f"{name}: {failure}")
            return {}
        self._referees.append(referee)
        if not referee.plans:
            self.unopened.append(f"{name}: the search space has one configuration, so there is nothing to choose")
        opening = monotonic() - start
        directions = list(dict.fromkeys(plan.key.direction for plan in referee.plans))
        directions = [d for d in directions if needs is None or d in needs]
        unfinished = {}
        for i, direction in enumerate(directions):
            behind = number + i / len(directions)
            left = self._end - monotonic()
            share = behind / turns if needs is None else min(1.0, max(0.0, 1 - left / self._settings.budget))
            self._observer.doing(f"{name}, {direction}", share)
            time = left / (turns - behind) / len(directions)
            if needs is not None:  # enough for one more configuration, rather than an even share
                time = min(left, max(time, needs[direction]))
            pace = Pace(monotonic() + time, self._end, self._settings.final_rounds, self._compile_seconds)
            studies = [
                Study(self._storage, self.facts.device_kind, plan, self._settings.seed)
                for plan in referee.plans
                if plan.key.direction == direction
            ]
            turn = Direction(problem, studies, referee, pace, self._settings, self.ledger)
            if not turn.tune():
                unfinished[direction] = opening + pace.least()
            self._compile_seconds = max(self._compile_seconds, turn.compile_seconds)
        return unfinished
