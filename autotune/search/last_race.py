"""The race that decides an entry: finalists and the heuristic's configuration in paired rounds."""

from __future__ import annotations

from collections.abc import Sequence

from xsake._measure.interference import Contention, calm_first, disturbance
from xsake._measure.isolation import Failed
from xsake._measure.ratio import Ratio
from xsake._measure.timing import Timing
from xsake.autotune.measure.contest import Round
from xsake.autotune.problem import Part, StudyPlan
from xsake.autotune.result import Measured, Result, Tried, geometric_mean
from xsake.autotune.search.pace import FINALISTS
from xsake.autotune.search.referee import Referee
from xsake.autotune.search.study import Study


class Race:
    """Rounds in which every configuration has one turn; the first configuration is the heuristic's.

    Ratios are taken within a round, heuristic's time / configuration's time, so that drift cancels.
    """

    def __init__(self, referee: Referee, plan: StudyPlan, parts: Sequence[Part], rounds: int):
        self._plan = plan
        self._rounds: list[list[Round]] = calm_first(
            lambda: referee.race(plan, parts), lambda one: any(at.contended.is_high for at in one), rounds
        )
        self.gains = [self._gain(i, range(len(plan.densities))) for i in range(len(parts))]

    def _gain(self, i: int, densities: Sequence[int]) -> Ratio:
        """Of configuration i, the geometric mean over the densities."""
        return Ratio.of(
            [geometric_mean([at[d].seconds[0] / at[d].seconds[i] for d in densities]) for at in self._rounds]
        )

    def _timing(self, i: int, density: int) -> Timing:
        return Timing.of([at[density].seconds[i] for at in self._rounds])

    @property
    def contended(self) -> Contention:
        return sum((one.contended for at in self._rounds for one in at), Contention())

    def disturbance(self, i: int) -> str | None:
        """Why the race of configuration i against the heuristic's was not calm, or None."""
        who = {"the heuristic": 0, "the configuration": i}
        densities = enumerate(self._plan.true_densities)
        times = {f"{name} at {true:.0%}": self._timing(j, d) for d, true in densities for name, j in who.items()}
        return disturbance(times, self.contended)

    def measured(self, i: int, workload: str) -> list[Measured]:
        return [
            Measured(
                workload=workload,
                asked=asked,
                density=true,
                default=self._timing(0, d),
                tuned=self._timing(i, d),
                gain=self._gain(i, [d]),
            )
            for d, (asked, true) in enumerate(zip(self._plan.densities, self._plan.true_densities, strict=True))
        ]


def last_race(study: Study, referee: Referee, workload: str, rounds: int) -> Result:
    """Race the finalists. The winner is the fastest that is correct and whose gain is shown beyond the rounds' spread.

    Without such a finalist the heuristic wins. A disturbed race has no winner: under load a configuration can be truly
    faster that is slower on a calm machine, since threads that wait for each other wait longer.
    """
    plan, tried = study.plan, study.tried
    if not any(t.part == plan.default and t.state == "complete" for t in tried):
        why = next((t.reason for t in tried if t.part == plan.default), "there was no time for it")
        return Result(plan=plan, tried=tried, failure=f"the heuristic's configuration has no time: {why}")
    if len(tried) == 1 and study.untried:  # an entry would hide the tuned entries of similar calls
        return Result(plan=plan, tried=tried, failure="there was time for the heuristic's configuration only")
    finalists = [plan.default, *[t.part for t in study.best if t.part != plan.default][:FINALISTS]]
    try:
        race = Race(referee, plan, finalists, rounds)
        best = max(range(len(finalists)), key=lambda i: race.gains[i].median)
        if disturbed := race.disturbance(best):
            shows = race.gains[best] if best else "no gain"
            failure = f"the machine is busy, so that a race proves nothing ({disturbed}; it shows {shows})"
            return Result(plan=plan, tried=tried, failure=failure, disturbed=True)
        for i in _ranking(race.gains):
            verdict = referee.verify(plan, finalists[i])
            if verdict.problem is None:
                break
            tried.append(Tried(finalists[i], "wrong", None, verdict.problem))
        else:
            return Result(plan=plan, tried=tried, failure="every finalist is wrong")
    except Failed as failure:
        return Result(plan=plan, tried=tried, failure=f"the last race failed: {failure}")
    return Result(
        plan=plan,
        tried=tried,
        config=finalists[i],
        gain=race.gains[i],
        waited=race.contended.share,
        measured=race.measured(i, workload),
        errors=verdict.errors,
    )


def _ranking(gains: Sequence[Ratio]) -> list[int]:
    """Indices of the finalists that beat the heuristic (index 0), fastest first, and then 0."""
    return [*sorted((i for i, gain in enumerate(gains) if gain.low > 1), key=lambda i: -gains[i].median), 0]
