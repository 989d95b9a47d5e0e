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
from xsake._race import contestants
from xsake._race.case import Case
from xsake._race.one import usual_dtype
from xsake._race.paired import Paired
from xsake._race.verdict import Busy, Slower, judge
from xsake.autotune import problem
from xsake.autotune.measure.isolation import Caller, Failed, Service, reason

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
class Outcome:
    """`now` and `then` are the ratios to dense attention; `verdict` is "ok", "slower", "busy", or "failed" where the
    call does not run to its end."""

    gate: Gate
    verdict: str
    then: float
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

    judge(again, lambda result: result["disturbed"])
    return kept[-1]


def baseline(storage: Path, here: str) -> tuple[Path, list[dict[str, Any]]]:
    """The newest baseline of this kind of machine. ValueError where there is none, or it is of another device."""
    files = sorted((storage / _machine()).glob(f"[0-9][0-9][0-9][0-9]_{_NAME}.json"))
    if not files:
        raise ValueError(f"{storage / _machine()} has no baseline: make one with --record and --shape")
    kept = read_json(files[-1])
    there = kept["machine_info"]["device"]
    if there != here:
        raise ValueError(f"{files[-1]} is a baseline of {there}, and this is {here}: make one with --record")
    return files[-1], [benchmark["extra_info"] for benchmark in kept["benchmarks"]]


def compare(extra: dict[str, Any], measure: Measurer) -> Outcome:
    """Measure one gate of a baseline until it is as fast as recorded, or slower in a calm measurement."""
    gate = Gate(**{field.name: extra[field.name] for field in dataclasses.fields(Gate)})
    then: float = extra["ratio"]
    last: dict[str, Any] = {}

    def again() -> dict[str, Any]:
        paired = measure(gate)
        allowed = 1 + max(LEAST, _NOISES * (extra["noise"] + noise(paired)))
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
        return Outcome(gate, "slower", then, **last, reason=str(why))
    except Busy as why:
        return Outcome(gate, "busy", then, **last, reason=str(why))
    except Failed as failed:
        return Outcome(gate, "failed", then, reason=reason(failed))
    return Outcome(gate, "ok", then, **last)


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
