"""One direction of one problem: its studies ask for configurations, which are compiled together and raced."""

from __future__ import annotations

import dataclasses
import math
import statistics
from time import monotonic

from xsake._measure import environment
from xsake._measure.isolation import Failed
from xsake._measure.ratio import FEWEST_ROUNDS
from xsake.autotune.measure.contest import COMPILERS
from xsake.autotune.problem import Part, Problem, label
from xsake.autotune.result import Result, Tried, geometric_mean
from xsake.autotune.search.last_race import last_race
from xsake.autotune.search.ledger import Ledger
from xsake.autotune.search.pace import Pace
from xsake.autotune.search.referee import Referee
from xsake.autotune.search.study import Candidate, Study


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    budget: float = math.inf  # seconds for the whole run
    trials: int = 1000  # at most, per study
    rounds: int = 5  # rounds of a trial's race
    final_rounds: int = 15  # rounds of the last race
    batch: int = max(4, COMPILERS)  # configurations compiled at the same time
    limit: float = 60.0  # seconds after which a race counts as hanging
    seed: int = 0  # of the sampler


class Direction:
    """The studies of one direction, one per bucket of density, in the time that `pace` gives them."""

    def __init__(
        self, problem: Problem, studies: list[Study], referee: Referee, pace: Pace, settings: Settings, ledger: Ledger
    ):
        self._problem, self._studies, self._referee = problem, studies, referee
        self._pace, self._settings, self._ledger = pace, settings, ledger
        self.compile_seconds = 0.0  # most seconds per configuration
        self._conditions = environment.conditions(ledger.facts.gpu)

    def tune(self) -> bool:
        """Tune, and write an entry per study. Returns whether no study has anything left to try or to race again."""
        for study in self._studies:
            for hint in self._ledger.hints(study.plan):
                study.enqueue(hint)
        if not self._ledger.has_written:
            self._make_first_entry()
        while batch := self._batch(self._pace.affordable(self._settings.batch)):
            with self._pace.batch(len({label(candidate.part) for candidate in batch})):
                broken, worth = self._compile(batch)
                self._race(batch, broken, worth)
        for study in self._studies:
            early = self._result(study)
            is_new = early is None or len(early.tried) < len(study.tried)
            if is_new or not self._pace.is_over(self._pace.budget_end):
                self._finish(study, self._pace.final_rounds(study.plan))
            self._ledger.announce(self._problem, study.plan)
        disturbed = any(result.disturbed for result in map(self._result, self._studies) if result)
        return not disturbed and not any(study.untried and self._room(study) > 0 for study in self._studies)

    def _make_first_entry(self) -> None:
        """Write an entry of the cheapest study first: a short budget then gives one entry rather than none."""
        cheapest = min(self._studies, key=lambda study: min(study.plan.true_densities))
        batch = self._batch(2)
        broken, worth = self._compile(batch)
        self._race([c for c in batch if c.study is cheapest], broken, self._pace.budget_end)
        self._finish(cheapest, FEWEST_ROUNDS)
        self._race([c for c in batch if c.study is not cheapest], broken, worth)

    def _finish(self, study: Study, rounds: int) -> None:
        result = last_race(study, self._referee, self._problem.workload.name, rounds)
        self._ledger.write(self._problem, result, self._conditions)

    def _result(self, study: Study) -> Result | None:
        return self._ledger.result(self._problem, study.plan)

    def _room(self, study: Study) -> int:
        return self._settings.trials - len(study.tried)

    def _batch(self, most: int) -> list[Candidate]:
        """Candidates of at most `most` configurations. If one study asks for a configuration, all studies try it."""
        batch: list[Candidate] = []
        parts: dict[str, Part] = {}
        room = {study.name: self._room(study) for study in self._studies}

        def ask(study: Study) -> bool:
            candidate = study.ask() if room[study.name] > 0 else None
            if candidate is None:
                return False
            room[study.name] -= 1
            parts[label(candidate.part)] = candidate.part
            batch.append(candidate)
            return True

        asking = self._studies
        while asking and len(parts) < most:
            asking = [study for study in asking if len(parts) < most and ask(study)]
        for study in self._studies:
            asked = {label(candidate.part) for candidate in batch if candidate.study is study}
            for part in [part for name, part in parts.items() if name not in asked]:
                study.enqueue(part)
                ask(study)
        order = list(parts)
        return sorted(batch, key=lambda candidate: order.index(label(candidate.part)))

    def _compile(self, batch: list[Candidate]) -> tuple[dict[str, str], float]:
        """Returns (errors by label, the time until which the other candidates may race).

        Races may last as long as compiling took: beyond the direction's share of time, but not beyond the budget.
        """
        start = monotonic()
        parts = {label(candidate.part): candidate.part for candidate in batch}
        direction = self._studies[0].plan.key.direction
        broken = self._referee.compile(direction, list(parts.values())) if parts else {}
        took = monotonic() - start
        self.compile_seconds = max(self.compile_seconds, took / max(len(parts), 1))
        return broken, min(self._pace.budget_end, start + 2 * took)

    def _race(self, batch: list[Candidate], broken: dict[str, str], worth: float) -> None:
        """Race the candidates. Abandon a candidate if the direction's time is over and the time `worth` has passed.

        The heuristic's configuration may race until the end of the budget: without its time a study has no result.
        """
        for candidate in batch:
            is_default = candidate.part == candidate.study.plan.default
            if self._pace.is_over(self._pace.budget_end if is_default else worth):
                candidate.abandon()
            elif (problem := broken.get(label(candidate.part))) is not None:
                candidate.stop("failed", problem)
            else:
                self._try(candidate)

    def _try(self, candidate: Candidate) -> None:
        """Race the candidate against the best configuration so far. After its first round its numbers are checked."""
        study, part = candidate.study, candidate.part
        plan = study.plan
        is_default = part == plan.default  # the measure of all others, so never stopped early
        best = next(iter(study.best), Tried(plan.default, "complete", 1.0, None))
        assert best.value is not None
        contestants = [part] if part == best.part else [part, best.part]
        try:
            ratios: list[float] = []
            for step in range(self._settings.rounds):
                with self._pace.race(plan, len(contestants)):
                    one = self._referee.race(plan, contestants)
                if step == 0 and (problem := self._referee.verify(plan, part).problem):
                    return candidate.stop("wrong", problem)
                ratios.append(geometric_mean([at.seconds[0] / at.seconds[-1] for at in one]))
                value = 1.0 if is_default else best.value * statistics.median(ratios)
                busy = any(at.contended.is_high for at in one)  # such a round proves nothing: go on
                if candidate.too_slow(value, step) and not (is_default or busy):
                    return candidate.stop("slower", f"{value:.2f} of the heuristic's time after {step + 1} rounds")
        except Failed as failure:
            return candidate.stop("failed", str(failure))
        candidate.complete(value)
