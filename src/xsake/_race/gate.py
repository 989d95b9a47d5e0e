"""Gates of speed: a baseline of this machine in pytest-benchmark's storage, and later measurements beside it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import jax

import xsake
from xsake._ground import atomic
from xsake._ground.read import read_json
from xsake._measure.isolation import Caller, Failed, Service, reason
from xsake._race import contestants
from xsake._race.case import Case
from xsake._race.one import usual_dtype
from xsake._race.paired import Paired
from xsake._race.verdict import Busy, Slower, judge
from xsake.autotune import problem

LEAST = 0.05  # a smaller slowdown is let through, whatever the noise
_NOISES = 2.0  # and so many times the noise of both measurements
_REFERENCE = "dense"
_NAME = "xsake-gate"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """A call whose time over dense attention's must stay."""

    shape: str
    implementation: str
    direction: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.implementation} {self.direction} {self.shape} {self.dtype}"

    def measure(self, rounds: int, round_seconds: float) -> Paired:
        """Compile and race; the gated call is the first program."""
        given = problem.from_call(self.shape, self.dtype, [1.0], None)
        (density,) = given.densities
        assert density is not None
        case, mask = Case(given.workload, self.direction, given.dtype, calls=1), given.workload.mask(density)
        who = (self.implementation, _REFERENCE)
        return Paired.race({name: contestants.contestant(name, case, mask) for name in who}, rounds, round_seconds)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A gate in a file of the storage: its time over dense attention's, and the noise of that measurement."""

    gate: Gate
    ratio: float
    noise: float
    path: Path

    @classmethod
    def of(cls, path: Path, extra: dict[str, Any]) -> Recorded:
        gate = Gate(**{field.name: extra[field.name] for field in dataclasses.fields(Gate)})
        return cls(gate, float(extra["ratio"]), float(extra["noise"]), path)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A recorded gate now. `now` is its time over dense attention's; `verdict` is "ok", "slower", "busy", or "failed"
    where the call does not run to its end."""

    recorded: Recorded
    verdict: str
    now: float | None = None
    allowed: float | None = None
    reason: str = ""


class GateService(Service):
    """The service in the process that measures. Its parent must not open the device."""

    def device(self) -> str:
        return jax.devices()[0].device_kind

    def platform(self) -> str:
        return jax.default_backend()

    def usual_dtype(self) -> str:
        return usual_dtype()

    def measure(self, gate: Gate, rounds: int, round_seconds: float) -> Paired:
        return gate.measure(rounds, round_seconds)


@dataclasses.dataclass(frozen=True)
class Measurer:
    """Measures gates in another process. `limit` is in seconds: after that, a measurement counts as hanging."""

    worker: Caller
    rounds: int
    round_seconds: float
    limit: float

    def device(self) -> str:
        return self.worker.call("device", limit=self.limit)

    def platform(self) -> str:
        return self.worker.call("platform", limit=self.limit)

    def __call__(self, gate: Gate) -> Paired:
        turns = 2 * (self.rounds + 1) * self.round_seconds
        return self.worker.call("measure", gate, self.rounds, self.round_seconds, limit=self.limit + 2 * turns)


def noise(paired: Paired) -> float:
    """How far apart the rounds' ratios are: their quartiles' distance over the median."""
    ratio = paired.over(_REFERENCE)
    return (ratio.high - ratio.low) / ratio.median


def record(gates: list[Gate], storage: Path, measure: Measurer) -> tuple[Path | None, dict[str, str]]:
    """Measure, and write the next file of the storage, if anything could be measured. The second result is why the
    others could not. Raises `Busy` where the machine gives no calm measurement.
    """
    found, reasons = [], {}
    for gate in gates:
        try:
            paired = _calm(gate, measure)
        except Failed as failed:
            reasons[gate.name] = reason(failed)
            continue
        extra = dataclasses.asdict(gate) | {"ratio": paired.over(_REFERENCE).median, "noise": noise(paired)}
        found.append(_benchmark(gate.name, paired.seconds[gate.implementation], extra))
    return (save(found, storage, measure.device()) if found else None), reasons


def save(benchmarks: list[dict[str, Any]], storage: Path, device: str) -> Path:
    """Write the next file of the storage."""
    folder = storage / _machine()
    folder.mkdir(parents=True, exist_ok=True)
    number = max((int(path.name[:4]) for path in folder.glob("[0-9][0-9][0-9][0-9]_*.json")), default=0) + 1
    path = folder / f"{number:04}_{_NAME}.json"
    atomic.write_text(path, json.dumps(_file(benchmarks, device), indent=1) + "\n")
    return path


def _calm(gate: Gate, measure: Measurer) -> Paired:
    kept: list[Paired] = []

    def again() -> dict[str, Any]:
        kept.append(measure(gate))
        return {"disturbed": kept[-1].disturbed}

    judge(again, lambda result: result["disturbed"] and "no measurement was calm")
    return kept[-1]


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
    return list(newest.values())


def _read(path: Path) -> tuple[str, list[Recorded]]:
    """The device of a file of the storage, and what it recorded."""
    kept = read_json(path)
    try:
        return kept["machine_info"]["device"], [Recorded.of(path, b["extra_info"]) for b in kept["benchmarks"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no baseline of `xsake gate` ({error!r}): delete it, and record again") from error


def compare(recorded: Recorded, measure: Measurer) -> Outcome:
    """Measure a gate until it is as fast as recorded, or slower in a calm measurement."""
    then, last = recorded.ratio, dict[str, Any]()

    def again() -> dict[str, Any]:
        paired = measure(recorded.gate)
        allowed = 1 + max(LEAST, _NOISES * (recorded.noise + noise(paired)))
        last.update(now=paired.over(_REFERENCE).median, allowed=allowed)
        return last | {"disturbed": paired.disturbed}

    def slowness(result: dict[str, Any]) -> str | None:
        slower = result["now"] / then
        if slower <= result["allowed"]:
            return None
        return f"{slower:.2f}x of the recorded time, and the noise lets {result['allowed']:.2f}x through"

    try:
        judge(again, slowness)
    except Slower as why:
        return Outcome(recorded, "slower", **last, reason=str(why))
    except Busy as why:
        return Outcome(recorded, "busy", **last, reason=str(why))
    except Failed as failed:
        return Outcome(recorded, "failed", reason=reason(failed))
    return Outcome(recorded, "ok", **last)


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
