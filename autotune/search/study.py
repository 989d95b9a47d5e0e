"""One Optuna study: which configurations of a direction were tried, how fast they were, and which to try next.

A trial's value = its time / the heuristic's time, so that trials of different machines of a kind can be compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import socket
from collections.abc import Callable
from typing import Any

import optuna
from optuna.trial import TrialState

from xsake.autotune.problem import Part, StudyPlan, label
from xsake.autotune.result import Tried

CLEARLY = 1.1  # a trial that takes more than this times the best one's time is stopped early
PARAMETER = "configuration"  # Optuna's only parameter: the varying fields of a configuration, as text


class Untried(optuna.samplers.BaseSampler):
    """Draws one of the `untried` configurations, each with the same probability.

    A sampler that learns from trials, such as TPE, would draw the fastest configuration of a list again and again.
    """

    def __init__(self, seed: int, untried: Callable[[], list[str]]):
        self._random, self._untried = random.Random(seed), untried

    def infer_relative_search_space(self, study: optuna.Study, trial: Any) -> dict[str, Any]:
        return {}

    def sample_relative(self, study: optuna.Study, trial: Any, search_space: dict[str, Any]) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: optuna.Study, trial: Any, param_name: str, param_distribution: Any) -> str:
        return self._random.choice(self._untried() or param_distribution.choices)


class ClearlySlower(optuna.pruners.BasePruner):
    """Stops a trial whose lowest value after any round is above `CLEARLY` times the best trial's value."""

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        done = [t.value for t in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)) if t.value is not None]
        rounds = trial.intermediate_values.values()
        return bool(done and rounds) and min(rounds) > CLEARLY * min(done)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A running trial of a study. Report each round with `too_slow`; then `complete`, `stop` or `abandon` the trial."""

    study: Study
    trial: optuna.Trial
    part: Part

    def too_slow(self, value: float, step: int) -> bool:
        self.trial.report(value, step)
        return self.trial.should_prune()

    def complete(self, value: float) -> None:
        self.trial.set_user_attr("end", "complete")
        self.trial.study.tell(self.trial, value)

    def stop(self, end: str, reason: str) -> None:
        """End the trial without a value; `end` is "slower", "failed" or "wrong"."""
        self.trial.set_user_attr("end", end)
        self.trial.set_user_attr("reason", reason[:500])
        self.trial.study.tell(self.trial, state=TrialState.PRUNED if end == "slower" else TrialState.FAIL)

    def abandon(self) -> None:
        """End the trial for lack of time; its configuration counts as untried."""
        self.trial.study.tell(self.trial, state=TrialState.FAIL)


class Study:
    """The study of a plan, continued if the storage has it.

    Its results are read from the trials' attributes, so that studies whose parameters were the configuration's fields,
    as they were stored before, continue too.
    """

    def __init__(self, storage: optuna.storages.BaseStorage, device_kind: str, plan: StudyPlan, seed: int):
        self.plan = plan
        labels = "".join(sorted(map(label, plan.parts)))
        # Changed kernels or a changed list of configurations start a new study.
        space = hashlib.sha256(labels.encode()).hexdigest()[:8]
        self.name = f"{device_kind} | {plan.key} | kernel {plan.kernel} | space {space}"
        self._choices = {self._choice(part): part for part in sorted(plan.parts, key=label)}
        self._study = optuna.create_study(
            storage=storage,
            study_name=self.name,
            sampler=Untried(seed, lambda: list(map(self._choice, self.untried))),
            pruner=ClearlySlower(),
            load_if_exists=True,
        )
        self._bury_the_dead()
        self.enqueue(plan.default)

    def _choice(self, part: Part) -> str:
        return ", ".join(f"{name}={json.dumps(part[name])}" for name in self.plan.fields)

    def _bury_the_dead(self) -> None:
        """End the trials of processes of this host that were killed: their configurations are tried again."""
        for trial in self._study.get_trials(states=(TrialState.RUNNING,)):
            host, _, pid = trial.user_attrs.get("by", "").rpartition(":")
            if host == socket.gethostname() and not _alive(int(pid)):
                self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    # -- results ---------------------------------------------------------------------------------------------------

    @property
    def tried(self) -> list[Tried]:
        """Every trial that ended with a result. Left out: abandoned trials, and complete trials whose process was
        killed before the time was stored.
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
        """Configurations that no process has tried or is trying."""
        running = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        known = [t.part for t in self.tried] + [t.user_attrs["part"] for t in running if "part" in t.user_attrs]
        labels = set(map(label, known))
        return [part for part in self.plan.parts if label(part) not in labels]

    # -- the next trial --------------------------------------------------------------------------------------------

    def enqueue(self, part: Part) -> None:
        """Try this configuration before the sampler's choices, unless it was tried or is queued already."""
        if part in self.untried:
            self._study.enqueue_trial({PARAMETER: self._choice(part)}, skip_if_exists=True)

    def ask(self) -> Candidate | None:
        """The next configuration that no process has tried; None if none is left."""
        while untried := self.untried:
            trial = self._study.ask()
            part = self._choices[trial.suggest_categorical(PARAMETER, list(self._choices))]
            candidate = Candidate(self, trial, part)
            if part in untried:
                trial.set_user_attr("part", part)
                trial.set_user_attr("by", f"{socket.gethostname()}:{os.getpid()}")
                return candidate
            candidate.abandon()  # two processes queued this configuration
        return None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
