"""The result of a study: its trials, its races, and the database entry made from them."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import math
from collections.abc import Sequence
from typing import Any

from xsake._measure.ratio import Ratio
from xsake._measure.timing import Timing
from xsake.autotune.problem import Part, StudyPlan
from xsake.tuning_db import Entry


@dataclasses.dataclass(frozen=True)
class Tried:
    """A trial that ended."""

    part: Part
    state: str  # "complete", "slower", "failed" or "wrong"
    value: float | None  # time / the heuristic's time
    reason: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Times in the last race at one density: of the heuristic's configuration and of the tuned one.

    `density` is the mask's, `asked` the density that its workload was asked for, and `gain` the heuristic's time over
    the tuned one's.
    """

    workload: str
    asked: float | None
    density: float
    default: Timing
    tuned: Timing
    gain: Ratio


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one study. If `config` is None, no entry is written, and `failure` says why.

    `gain` is the geometric mean over the densities, and `waited` the share of contention in the last race. `disturbed`:
    that race was too disturbed for an entry.
    """

    plan: StudyPlan
    tried: Sequence[Tried]
    config: Part | None = None
    gain: Ratio | None = None
    waited: float = 0.0
    measured: Sequence[Measured] = ()
    errors: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    failure: str | None = None
    disturbed: bool = False

    @property
    def counts(self) -> dict[str, int]:
        return dict(collections.Counter(t.state for t in self.tried))

    def entry(self, *, seed: int, environment: str, conditions: dict[str, Any]) -> Entry:
        assert self.config is not None and self.gain is not None
        about = {
            "source": "measured",
            "kernel": self.plan.kernel,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **of_race(self.gain, self.measured, self.waited),
            "trials": self.counts,
            "values": sorted(round(t.value, 4) for t in self.tried if t.value is not None),
            "seed": seed,
            "errors": {name: {k: float(f"{v:.3g}") for k, v in e.items()} for name, e in self.errors.items()},
            "environment": environment,
            "conditions": conditions,
        }
        return Entry(self.plan.key, self.config, about)


def of_race(gain: Ratio, measured: Sequence[Measured], waited: float) -> dict[str, Any]:
    """What an entry says of the race that decided it."""
    return {
        "speedup": round(gain.median, 4),
        "gain": {
            "low": round(gain.low, 4),
            "high": round(gain.high, 4),
            "rounds": gain.rounds,
            "waited": round(waited, 4),
        },
        "measured": [
            {
                "workload": m.workload,
                "density": round(m.density, 4),
                "default": _us(m.default),
                "tuned": _us(m.tuned),
            }
            for m in measured
        ],
    }


def _us(timing: Timing) -> dict[str, float]:
    """Median and quartiles in microseconds, and the number of rounds."""
    return {n: round(getattr(timing, n) * 1e6, 2) for n in ("median", "low", "high")} | {"rounds": timing.rounds}


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
