"""Gates of speed: a baseline of this machine in pytest-benchmark's storage, and later measurements beside it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

import xsake
from xsake._ground import atomic
from xsake._ground.read import read_json
from xsake._measure.environment import Facts
from xsake._measure.isolation import Caller, Failed, Service, reason
from xsake._measure.ratio import Ratio
from xsake._measure.timing import seconds_per_call
from xsake._op import registry
from xsake._race import contestants
from xsake._race.course import Course
from xsake._race.one import usual_dtype
from xsake._race.paired import Paired
from xsake._race.slowdown import RULED_OUT, Busy, Slowdown, calm, slowdown_since
from xsake.autotune import problem

_REFERENCE = "dense"
_NAME = "xsake-gate"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """A call whose time over dense attention's must stay. `file` is the implementation's, where no package has it."""

    shape: str
    implementation: str
    direction: str
    dtype: str
    file: str | None = dataclasses.field(default=None, compare=False)

    @property
    def name(self) -> str:
        return f"{self.implementation} {self.direction} {self.shape} {self.dtype}"

    def programs(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """The call and dense attention, compiled."""
        if self.file is not None:
            registry.name_of(self.file)  # registers it in this process
        given = problem.from_call(self.shape, self.dtype, [1.0], None)
        (density,) = given.densities
        assert density is not None
        course, mask = Course(given.workload, self.direction, given.dtype, calls=1), given.workload.mask(density)
        call, reference = (contestants.contestant(name, course, mask) for name in (self.implementation, _REFERENCE))
        return call, reference


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A gate in a file of the storage, and its time over dense attention's.

    The ratio is None in a file of an earlier xsake, which kept no rounds.
    """

    gate: Gate
    ratio: Ratio | None
    path: Path

    @classmethod
    def of(cls, path: Path, extra: dict[str, Any]) -> Recorded:
        names = [field.name for field in dataclasses.fields(Gate) if field.name in extra]
        gate = Gate(**{name: extra[name] for name in names})
        return cls(gate, Ratio.of(extra["ratios"]) if "ratios" in extra else None, path)


@dataclasses.dataclass(frozen=True)
class Compared:
    """A recorded gate now; without a slowdown where the call does not run to its end, for this reason."""

    recorded: Recorded
    slowdown: Slowdown | None
    reason: str


class GateService(Service):
    """The service in the process that measures. Its parent must not open the device."""

    def __init__(self) -> None:
        self._programs: tuple[Callable[[], Any], Callable[[], Any]] | None = None

    def usual_dtype(self) -> str:
        return usual_dtype()

    def prepare(self, gate: Gate) -> float:
        """Compile the programs of a gate; the seconds that a call of each takes."""
        self._programs = None  # free the memory of the gate before
        self._programs = gate.programs()
        for program in self._programs:
            jax.block_until_ready(program())
        return sum(seconds_per_call(program, 1) for program in self._programs)

    def race(self, rounds: int, round_seconds: float) -> Paired:
        assert self._programs is not None
        return Paired.race(*self._programs, rounds=rounds, round_seconds=round_seconds)


@dataclasses.dataclass(frozen=True)
class Measurer:
    """Measures gates in another process. `limit` is in seconds: after that, compiling counts as hanging."""

    worker: Caller
    rounds: int
    round_seconds: float
    limit: float

    def facts(self) -> Facts:
        return self.worker.call("facts", limit=self.limit)

    def __call__(self, gate: Gate) -> Paired:
        once = self.worker.call("prepare", gate, limit=self.limit)
        turns = 4 * (self.rounds + 1) * (once + self.round_seconds)
        return self.worker.call("race", self.rounds, self.round_seconds, limit=self.limit + 2 * turns)


def record(gates: list[Gate], storage: Path, measure: Measurer) -> tuple[Path | None, dict[str, str]]:
    """Measure, and write the next file of the storage, if anything could be measured. The second result is why the
    others could not. Raises `Busy` where the machine gives no calm measurement, or rounds too far apart.
    """
    found, reasons = [], {}
    for gate in gates:
        try:
            paired = calm(partial(measure, gate), _tells)
        except Failed as failed:
            reasons[gate.name] = reason(failed)
            continue
        if not _tells(paired.ratio):
            ratio = paired.ratio
            apart = f"the rounds of {gate.name} are too far apart, from {ratio.low:.3f} to {ratio.high:.3f}"
            raise Busy(f"{apart}; give more --rounds")
        found.append(_benchmark(gate.name, paired.call, dataclasses.asdict(gate) | {"ratios": paired.ratios}))
    return (save(found, storage, measure.facts().device_kind) if found else None), reasons


def _tells(ratio: Ratio) -> bool:
    """Whether a later measurement can be compared with this one: it is surer than a slowdown of RULED_OUT."""
    return ratio.high < RULED_OUT * ratio.low


def save(benchmarks: list[dict[str, Any]], storage: Path, device: str) -> Path:
    """Write the next file of the storage."""
    folder = storage / _machine()
    folder.mkdir(parents=True, exist_ok=True)
    number = max((int(path.name[:4]) for path in folder.glob("[0-9][0-9][0-9][0-9]_*.json")), default=0) + 1
    path = folder / f"{number:04}_{_NAME}.json"
    atomic.write_text(path, json.dumps(_file(benchmarks, device), indent=1) + "\n")
    return path


def baseline(storage: Path, here: str) -> list[Recorded]:
    """The newest record of every call on this kind of machine. ValueError where there is none of this device."""
    folder = storage / _machine()
    newest: dict[Gate, Recorded] = {}
    others = set()
    for path in sorted(folder.glob(f"[0-9][0-9][0-9][0-9]_{_NAME}.json")):
        device, recorded = _read(path)
        if device == here:
            newest |= {one.gate: one for one in recorded}
        else:
            others.add(device)
    if others and not newest:
        devices = ", ".join(sorted(others))
        raise ValueError(f"{folder} has baselines of {devices}, and this is {here}: make one with --record")
    if not newest:
        raise ValueError(f"{folder} has no baseline: make one with --record and --shape")
    if old := sorted({str(one.path) for one in newest.values() if one.ratio is None}):
        told = "of an earlier xsake, which kept no rounds to compare with"
        raise ValueError(f"{', '.join(old)}: {told}; record these calls again, or delete the file")
    return list(newest.values())


def _read(path: Path) -> tuple[str, list[Recorded]]:
    """The device of a file of the storage, and what it recorded."""
    kept = read_json(path)
    try:
        return kept["machine_info"]["device"], [Recorded.of(path, b["extra_info"]) for b in kept["benchmarks"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no baseline of `xsake gate` ({error!r}): delete it, and record again") from error


def compare(recorded: Recorded, measure: Measurer) -> Compared:
    assert recorded.ratio is not None
    try:
        slowdown = slowdown_since(recorded.ratio, partial(measure, recorded.gate))
    except Failed as failed:
        return Compared(recorded, None, reason(failed))
    return Compared(recorded, slowdown, slowdown.reason)


# -- pytest-benchmark's storage ----------------------------------------------------------------------------------------


def _machine() -> str:
    """The folder of this machine, as pytest-benchmark names it."""
    bits = platform.architecture()[0]
    version = ".".join(platform.python_version_tuple()[:2])
    return "-".join([platform.system(), platform.python_implementation(), version, bits])


def _file(benchmarks: list[dict[str, Any]], device: str) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC).isoformat()
    machine = {
        "node": "",
        "machine": platform.machine(),
        "device": device,
        "jax": jax.__version__,
    }
    return {
        "machine_info": machine | {"xsake": xsake.__version__},
        "commit_info": {"id": "unversioned", "time": now, "dirty": False, "project": "xsake", "branch": "(unknown)"},
        "benchmarks": benchmarks,
        "datetime": now,
        "version": "5.0.0",
    }


def _benchmark(name: str, seconds: list[float], extra: dict[str, Any]) -> dict[str, Any]:
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    spread, mean, deviation = high - low, statistics.mean(seconds), statistics.stdev(seconds)
    inside = [x for x in seconds if low - 1.5 * spread <= x <= high + 1.5 * spread]
    far = sum(abs(x - mean) > deviation for x in seconds)
    stats = {
        "min": min(seconds),
        "max": max(seconds),
        "mean": mean,
        "stddev": deviation,
        "rounds": len(seconds),
        "median": median,
        "iqr": spread,
        "q1": low,
        "q3": high,
        "iqr_outliers": len(seconds) - len(inside),
        "stddev_outliers": far,
        "outliers": f"{far};{len(seconds) - len(inside)}",
        "ld15iqr": min(inside),
        "hd15iqr": max(inside),
        "ops": 1 / mean,
        "total": sum(seconds),
        "data": seconds,
        "iterations": 1,
    }
    about = {"group": None, "name": name, "fullname": f"xsake gate::{name}", "params": None, "param": None}
    options = {"disable_gc": False, "timer": "perf_counter", "warmup": True}
    return about | {"extra_info": extra, "options": options, "stats": stats}
