"""One Optuna study: which configurations of a direction were tried, how fast they were, what to try next.

A trial's value = its time / the heuristic's time, so that trials of two machines of one kind can be compared.
"""

from __future__ import annotations

import dataclasses
import os
import socket

import optuna
from optuna.trial import TrialState

from xsake.autotune.search.problem import Part, StudyPlan, label
from xsake.autotune.search.space import Space

CLEARLY = 1.1  # a trial that takes more than this times the best one's time is stopped early
_DRAWS = 20  # draws of the sampler, before the first untried configuration is taken instead


class ClearlySlower(optuna.pruners.BasePruner):
    """Stops a trial whose lowest value after any round is above `CLEARLY` times the best trial's value."""

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        done = [t.value for t in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)) if t.value is not None]
        rounds = trial.intermediate_values.values()
        return bool(done and rounds) and min(rounds) > CLEARLY * min(done)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A running trial. Report each round with `too_slow`, then end it with `complete`, `stop` or `abandon`."""

    trial: optuna.Trial
    part: Part


@dataclasses.dataclass(frozen=True)
class Tried:
    """A trial that ended."""

    part: Part
    state: str  # "complete", "slower", "failed" or "wrong"
    value: float | None  # time / the heuristic's time
    reason: str | None


class Study:
    def __init__(self, storage: optuna.storages.BaseStorage, device_kind: str, plan: StudyPlan, seed: int):
        self.plan, self.space = plan, Space(plan.parts)
        # Changed kernels or a changed space start a new study.
        self.name = f"{device_kind} | {plan.key} | kernel {plan.kernel} | space {self.space.hash}"
        self._study = optuna.create_study(
            storage=storage,
            study_name=self.name,
            sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=4),
            pruner=ClearlySlower(),
            load_if_exists=True,
        )
        self._bury_the_dead()
        self.enqueue(plan.default)

    def _bury_the_dead(self) -> None:
        """End the trials of processes of this host that were killed: their configurations are tried again."""
        for trial in self._study.get_trials(states=(TrialState.RUNNING,)):
            host, _, pid = trial.user_attrs.get("by", "").rpartition(":")
            if host == socket.gethostname() and not _alive(int(pid)):
                self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    # -- what was tried --------------------------------------------------------------------------------------------

    @property
    def tried(self) -> list[Tried]:
        """Every trial that ended with a result. Left out: infeasible draws, abandoned trials, and complete trials whose
        process was killed before the time was stored.
        """
        ended = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL))
        return [
            Tried(t.user_attrs["part"], t.user_attrs["end"], t.value, t.user_attrs.get("reason"))
            for t in ended
            if "end" in t.user_attrs and (t.value is not None or t.user_attrs["end"] != "complete")
        ]

    @property
    def best(self) -> list[Tried]:
        """The complete trials, fastest first."""
        return sorted((t for t in self.tried if t.state == "complete"), key=lambda t: t.value or 0.0)

    @property
    def untried(self) -> list[Part]:
        known = {label(t.part) for t in self.tried} | {label(p) for p in self._in_work()}
        return [part for name, part in self.space.parts.items() if name not in known]

    def _in_work(self) -> list[Part]:
        trials = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [t.user_attrs["part"] for t in trials if "part" in t.user_attrs]

    # -- what to try -----------------------------------------------------------------------------------------------

    def enqueue(self, part: Part) -> None:
        """Try this configuration before the sampler's choices, unless it was tried or is queued already."""
        if part in self.untried:
            self._study.enqueue_trial(self.space.parameters(part), skip_if_exists=True)

    def ask(self) -> Candidate | None:
        """The next feasible configuration that no process has tried; None if none is left."""
        for _ in range(_DRAWS):
            untried = self.untried
            if not untried:
                return None
            if candidate := self._draw(untried):
                return candidate
        self._study.enqueue_trial(self.space.parameters(untried[0]))
        return self._draw(untried)

    def _draw(self, untried: list[Part]) -> Candidate | None:
        trial = self._study.ask()
        part = self.space.suggest(trial)
        if part not in untried:
            trial.set_user_attr("reason", "tried already" if part in self.space else "infeasible")
            self._study.tell(trial, state=TrialState.PRUNED)
            return None
        trial.set_user_attr("part", part)
        trial.set_user_attr("by", f"{socket.gethostname()}:{os.getpid()}")
        return Candidate(trial, part)

    # -- how it ended ----------------------------------------------------------------------------------------------

    def too_slow(self, candidate: Candidate, value: float, step: int) -> bool:
        candidate.trial.report(value, step)
        return candidate.trial.should_prune()

    def complete(self, candidate: Candidate, value: float) -> None:
        candidate.trial.set_user_attr("end", "complete")
        self._study.tell(candidate.trial, value)

    def stop(self, candidate: Candidate, end: str, reason: str) -> None:
        """End a trial without a value; `end` is "slower", "failed" or "wrong"."""
        candidate.trial.set_user_attr("end", end)
        candidate.trial.set_user_attr("reason", reason[:500])
        self._study.tell(candidate.trial, state=TrialState.PRUNED if end == "slower" else TrialState.FAIL)

    def abandon(self, candidate: Candidate) -> None:
        """End a trial for lack of time; its configuration counts as untried."""
        self._study.tell(candidate.trial, state=TrialState.FAIL)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
