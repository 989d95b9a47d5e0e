"""The tuning loop: problems in turn, a direction's studies together, within a budget. Results are written at once."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Protocol, runtime_checkable

import optuna

from xsake import tuning_db
from xsake.autotune.measure import environment
from xsake.autotune.measure.contest import COMPILERS
from xsake.autotune.measure.isolation import Caller, Failed
from xsake.autotune.measure.timing import Timing
from xsake.autotune.search.pace import FEWEST_ROUNDS, FINALISTS, Pace
from xsake.autotune.search.problem import Part, Problem, StudyPlan, label
from xsake.autotune.search.referee import Referee
from xsake.autotune.search.study import Candidate, Study, Tried
from xsake.autotune.write import writer
from xsake.autotune.write.result import Measured, Result, geometric_mean
from xsake.tuning_db import Key

_HINTS = 3
_Candidates = list[tuple[Study, Candidate]]
_Pending = tuple[Problem, dict[str, float] | None]  # seconds needed at least, by direction to tune; None: all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """budget: seconds for the whole run; trials: at most, per study; rounds: rounds of a trial's race; final_rounds:
    rounds of the last race; batch: configurations compiled at the same time; limit: seconds after which a race counts
    as hanging; seed: of the sampler.
    """

    budget: float = math.inf
    trials: int = 1000
    rounds: int = 5
    final_rounds: int = 9
    batch: int = max(4, COMPILERS)
    limit: float = 60.0
    seed: int = 0


@runtime_checkable
class Observer(Protocol):
    """Is told what the tuner does, and the result of every study."""

    def doing(self, what: str, share: float) -> None:
        """`what` begins; `share`, from 0 to 1, is the part of the whole work that is done."""

    def done(self, result: Result) -> None: ...


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
        self.facts: environment.Facts = worker.call("facts", limit=4 * settings.limit)
        self.path = folder / tuning_db.file_name(self.facts.device_kind)
        writer.check_writable(self.path)
        self._results: dict[tuple[Problem, Key], Result] = {}
        self._compile_seconds = 0.0  # most seconds per configuration so far
        self.unopened: list[str] = []  # problems that could not even be set up, and why

    @property
    def results(self) -> list[Result]:
        return list(self._results.values())

    @property
    def has_written(self) -> bool:
        return any(result.config is not None for result in self.results)

    @property
    def least_budget(self) -> float | None:
        """If there was no time for a single entry, a budget in seconds to try next: twice the time spent."""
        now = monotonic()
        return None if self.has_written or now < self._end else 2 * (now - self._start)

    def tune(self, problems: Sequence[Problem]) -> None:
        """Tune the problems, small ones first. Problems and their directions share the time evenly.

        Time that a direction does not use goes to the next ones, and time left at the end to unfinished directions.
        """
        pending: list[_Pending] = [(p, None) for p in sorted(problems, key=lambda p: p.workload.flops())]
        trials = -1
        while pending and monotonic() < self._end and self._trials() > trials:  # stop after a round without new trials
            trials = self._trials()
            pending = self._round(pending)
        self._observer.doing("done", 1.0)

    def _trials(self) -> int:
        return sum(len(result.tried) for result in self.results)

    def _round(self, pending: list[_Pending]) -> list[_Pending]:
        """Give each problem one turn. Returns the problems that are not done, and their unfinished directions."""
        first = not self._results
        left_over: list[_Pending] = []
        for number, (problem, needs) in enumerate(pending):
            start = monotonic()
            if needs is not None:
                needs = {direction: least for direction, least in needs.items() if least < self._end - start}
            if start >= self._end or needs == {}:
                continue
            name = f"{problem.workload.name}, block {problem.workload.block}"
            try:
                referee = Referee(self._worker, problem, self._settings.limit)
            except Failed as failure:
                self.unopened.append(f"{name}: {failure}")
                continue
            opening = monotonic() - start
            directions = list(dict.fromkeys(plan.key.direction for plan in referee.plans))
            directions = [d for d in directions if needs is None or d in needs]
            undone = {}
            for i, direction in enumerate(directions):
                behind = number + i / len(directions)
                left = self._end - monotonic()
                share = behind / len(pending) if first else min(1.0, max(0.0, 1 - left / self._settings.budget))
                self._observer.doing(f"{name}, {direction}", share)
                turn = left / (len(pending) - behind) / len(directions)
                if needs is not None:  # enough for one more configuration, rather than an even share
                    turn = min(left, max(turn, needs[direction]))
                pace = Pace(monotonic() + turn, self._settings.final_rounds, self._compile_seconds)
                plans = [plan for plan in referee.plans if plan.key.direction == direction]
                if not self._tune_direction(problem, referee, plans, pace):
                    undone[direction] = opening + pace.least()
            if undone:
                left_over.append((problem, undone))
        return left_over

    # -- one direction of one problem ------------------------------------------------------------------------------

    def _tune_direction(self, problem: Problem, referee: Referee, plans: list[StudyPlan], pace: Pace) -> bool:
        """Tune one direction. Returns whether no study has anything left to try."""
        conditions = environment.conditions(self.facts.platform)
        studies = [Study(self._storage, self.facts.device_kind, plan, self._settings.seed) for plan in plans]
        for study in studies:
            for hint in self._hints(study.plan):
                study.enqueue(hint)
        if not self.has_written:
            self._make_first_entry(problem, studies, referee, pace, conditions)
        while candidates := self._batch(studies, pace.affordable(self._settings.batch)):
            with pace.batch(len({label(candidate.part) for _, candidate in candidates})):
                broken, worth = self._compile(candidates, referee)
                self._race(candidates, broken, worth, referee, pace)
        for study in studies:
            early = self._results.get((problem, study.plan.key))
            if early is None or len(early.tried) < len(study.tried) or not pace.is_over(self._end):
                early = self._finish(problem, study, referee, pace.final_rounds(study.plan))
                self._write(early, problem, conditions)
            self._observer.done(early)
        return not any(self._can_go_on(study) for study in studies)

    def _make_first_entry(
        self, problem: Problem, studies: list[Study], referee: Referee, pace: Pace, conditions: dict[str, Any]
    ) -> None:
        """Write an entry of the cheapest study first: a short budget then gives one entry rather than none."""
        cheapest = min(studies, key=lambda study: min(study.plan.true_densities))
        candidates = self._batch(studies, 2)
        broken, worth = self._compile(candidates, referee)
        self._race([c for c in candidates if c[0] is cheapest], broken, self._end, referee, pace)
        self._write(self._finish(problem, cheapest, referee, FEWEST_ROUNDS), problem, conditions)
        self._race([c for c in candidates if c[0] is not cheapest], broken, worth, referee, pace)

    def _compile(self, candidates: _Candidates, referee: Referee) -> tuple[dict[str, str], float]:
        """Returns (what went wrong by label, the time until which the rest may race).

        Races may last as long as compiling took: beyond the direction's share of time, but not beyond the budget.
        """
        start = monotonic()
        parts = {label(candidate.part): candidate.part for _, candidate in candidates}
        direction = next((study.plan.key.direction for study, _ in candidates), "")
        broken = referee.compile(direction, list(parts.values())) if parts else {}
        took = monotonic() - start
        self._compile_seconds = max(self._compile_seconds, took / max(len(parts), 1))
        return broken, min(self._end, start + 2 * took)

    def _race(
        self, candidates: _Candidates, broken: dict[str, str], worth: float, referee: Referee, pace: Pace
    ) -> None:
        """Race the candidates. Abandon a candidate if the direction's time is over and the time `worth` has passed.

        The heuristic's configuration may race until the end of the budget: without its time a study has no result.
        """
        for study, candidate in candidates:
            end = self._end if candidate.part == study.plan.default else worth
            if pace.is_over() and pace.is_over(end):
                study.abandon(candidate)
            else:
                self._try(study, candidate, referee, broken.get(label(candidate.part)), pace)

    def _write(self, result: Result, problem: Problem, conditions: dict[str, Any]) -> None:
        if result.config is not None:
            entry = result.entry(seed=self._settings.seed, environment=self.facts.environment_id, conditions=conditions)
            known = {self.facts.environment_id: self.facts.environment}
            writer.merge(self.path, self.facts.device_kind, [entry], known)
        self._results[problem, result.plan.key] = result

    def _can_go_on(self, study: Study) -> bool:
        return bool(study.untried) and len(study.tried) < self._settings.trials

    def _hints(self, plan: StudyPlan) -> list[Part]:
        """Configurations that won elsewhere: in the databases, then in this run, the latest first."""
        hints = [dict(found.entry.config)] if (found := tuning_db.find(self.facts.device_kind, plan.key)) else []
        like = (plan.key.implementation, plan.key.direction)
        for result in reversed(self.results):
            key = result.plan.key
            if result.config is not None and (key.implementation, key.direction) == like:
                hints.append(result.config)
        feasible = {label(part) for part in plan.parts}
        return list({label(h): h for h in hints if label(h) in feasible}.values())[:_HINTS]

    def _batch(self, studies: list[Study], most: int) -> _Candidates:
        """At most `most` configurations to compile together. If one study asks for a configuration, all try it."""
        asked: _Candidates = []
        parts: dict[str, Part] = {}
        room = {study.name: self._settings.trials - len(study.tried) for study in studies}

        def ask(study: Study) -> bool:
            candidate = study.ask() if room[study.name] > 0 else None
            if candidate is None:
                return False
            room[study.name] -= 1
            parts[label(candidate.part)] = candidate.part
            asked.append((study, candidate))
            return True

        asking = list(studies)
        while asking and len(parts) < most:
            asking = [study for study in asking if len(parts) < most and ask(study)]
        for study in studies:
            mine = {label(c.part) for s, c in asked if s is study}
            for part in [part for name, part in parts.items() if name not in mine]:
                study.enqueue(part)
                ask(study)
        order = {name: i for i, name in enumerate(parts)}
        return sorted(asked, key=lambda pair: order[label(pair[1].part)])

    def _try(self, study: Study, candidate: Candidate, referee: Referee, broken: str | None, pace: Pace) -> None:
        if broken is not None:
            return study.stop(candidate, "failed", broken)
        plan, part = study.plan, candidate.part
        is_default = part == plan.default  # the measure of all others, so never stopped early
        best = next(iter(study.best), Tried(plan.default, "complete", 1.0, None))
        assert best.value is not None
        try:
            ratios: list[float] = []
            for step in range(self._settings.rounds):
                contestants = [part] if part == best.part else [part, best.part]
                with pace.race(plan, len(contestants)):
                    seconds = referee.race(plan, contestants)
                ratios.append(geometric_mean([of_all[0] / of_all[-1] for of_all in seconds]))
                value = 1.0 if is_default else best.value * statistics.median(ratios)
                if study.too_slow(candidate, value, step) and not is_default:
                    return study.stop(
                        candidate, "slower", f"{value:.2f} of the heuristic's time after {step + 1} rounds"
                    )
            if (is_default or value < best.value) and (problem := referee.verify(plan, part).problem):
                return study.stop(candidate, "wrong", problem)
        except Failed as failure:
            return study.stop(candidate, "failed", str(failure))
        study.complete(candidate, value)

    # -- the last race ---------------------------------------------------------------------------------------------

    def _finish(self, problem: Problem, study: Study, referee: Referee, rounds: int) -> Result:
        """Race the finalists. The fastest one wins that is correct and beats the heuristic in three rounds of four.

        If there is none, the heuristic wins.
        """
        plan, tried = study.plan, study.tried
        if not any(t.part == plan.default and t.state == "complete" for t in tried):
            why = next((t.reason for t in tried if t.part == plan.default), "there was no time for it")
            return Result(plan=plan, tried=tried, failure=f"the heuristic's configuration has no time: {why}")
        if len(tried) == 1 and study.untried:  # an entry would hide the tuned entries of similar calls
            return Result(plan=plan, tried=tried, failure="there was time for the heuristic's configuration only")
        finalists = [plan.default, *[t.part for t in study.best if t.part != plan.default][:FINALISTS]]
        try:
            races = [referee.race(plan, finalists) for _ in range(rounds)]
            for i in self._ranking(races):
                verdict = referee.verify(plan, finalists[i])
                if verdict.problem is None:
                    break
                tried.append(Tried(finalists[i], "wrong", None, verdict.problem))
            else:
                return Result(plan=plan, tried=tried, failure="every finalist is wrong")
        except Failed as failure:
            return Result(plan=plan, tried=tried, failure=f"the last race failed: {failure}")
        measured = [
            Measured(
                workload=problem.workload.name,
                density=density,
                default=Timing.of([seconds[d][0] for seconds in races]),
                tuned=Timing.of([seconds[d][i] for seconds in races]),
            )
            for d, density in enumerate(plan.true_densities)
        ]
        return Result(plan=plan, tried=tried, config=finalists[i], measured=measured, errors=verdict.errors)

    @staticmethod
    def _ranking(rounds: list[list[list[float]]]) -> list[int]:
        """Indices of the finalists that beat the heuristic (index 0), fastest first, and then 0.

        Compared are the rounds' ratios, finalist's time / heuristic's time, so that drift cancels.
        """

        def ratios(i: int) -> Timing:
            return Timing.of([geometric_mean([mine[i] / mine[0] for mine in seconds]) for seconds in rounds])

        faster = [i for i in range(1, len(rounds[0][0])) if ratios(i).high < 1]
        return [*sorted(faster, key=lambda i: ratios(i).median), 0]
