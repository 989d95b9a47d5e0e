"""The gates of `benchmarks.gate`: cases, their measurement against dense attention, and the margins that they allow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from benchmarks import record
from xsake import tuning_db
from xsake._race.case import DIRECTIONS, Case
from xsake._race.contestant import dense, sparse
from xsake._race.paired import Paired
from xsake._race.verdict import Busy, Slower, judge
from xsake.autotune.workloads import WORKLOADS, Workload

MARGIN = 1.25  # the ratio to dense attention may be so many times the recorded ratio
SLOWER = 1.1  # the tuned configuration may take so many times the heuristic's time


@dataclasses.dataclass(frozen=True)
class Gate:
    workload: Workload
    density: float
    direction: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.workload.name} {self.density:g} {self.direction}"


def cases() -> list[Gate]:
    """The cases of this platform, few enough for a minute or two."""
    names, dtype = (("gpt4k", "gpt4k_d64", "llama32k", "full16k"), "bfloat16")
    if jax.default_backend() == "cpu":
        names, dtype = ("cpu4k",), "float32"
    return [Gate(WORKLOADS[n], d, direction, dtype) for n in names for d in (0.43, 0.1) for direction in DIRECTIONS]


def contestants(case: Gate, attend: Callable = sparse) -> dict[str, Callable]:
    """Compiled calls: attention as tuned, dense attention, and attention with the heuristic's configuration."""
    implementation = "xla" if jax.default_backend() == "cpu" else "cudnn"
    at, mask = Case(case.workload, case.direction, case.dtype, calls=1), case.workload.mask(case.density)
    theirs = dense(implementation, is_causal=case.workload.is_causal)
    compiled = {"xsake": at.compiled(attend, mask), "dense": at.compiled(theirs)}
    with tuning_db.heuristics_only():
        return compiled | {"heuristic": at.compiled(attend, mask)}


def measure(name: str, programs: dict[str, Callable], *, rounds: int = 5, round_seconds: float = 0.2) -> dict[str, Any]:
    """Ratios of a call to dense attention and to the heuristic, all in one race.

    A ratio is the median of the rounds' ratios; within a round, contestants run right after one another.
    """
    found = Paired.race(programs, rounds, round_seconds)
    return {
        "name": name,
        "over_dense": found.over("dense").median,
        "over_heuristic": found.over("heuristic").median,
        "seconds": {who: dataclasses.asdict(t) for who, t in found.times.items()},
        "disturbed": found.disturbed,
    }


def recorded_name() -> str:
    return f"gates_{tuning_db.file_name(jax.devices()[0].device_kind).removesuffix('.json')}"


def recorded() -> dict[str, dict[str, Any]] | None:
    """Recorded results by name, or None if this kind of device has none."""
    try:
        return {r["name"]: r for r in record.load(recorded_name())["results"]}
    except FileNotFoundError:
        return None


def slowness(result: dict[str, Any], known: dict[str, dict[str, Any]]) -> str | None:
    """Why a result is past the margins, or None."""
    name, now = result["name"], result["over_dense"]
    if name not in known:
        raise KeyError(f"{name!r} has no recorded ratio: run python -m benchmarks.gate --record")
    then = known[name]["over_dense"]
    if now > MARGIN * then:
        return f"{name}: {now:.3f} of dense attention's time; {then:.3f} were recorded, {MARGIN}x are let through"
    if result["over_heuristic"] > SLOWER:
        return f"{name}: what was tuned takes {result['over_heuristic']:.2f} of the heuristic's time"
    return None


def check(case: Gate, known: dict[str, dict[str, Any]], attend: Callable = sparse) -> dict[str, Any]:
    """Measure a case until it is as fast as recorded; raise `Slower` or `Busy` if it never is."""
    programs = contestants(case, attend)
    return judge(lambda: measure(case.name, programs), lambda result: slowness(result, known))


def record_all() -> None:
    results = []
    for case in cases():
        again = partial(measure, case.name, contestants(case))
        results.append(judge(again, lambda result: result["disturbed"]))
        print(_line(results[-1]), flush=True)
    print(f"recorded in {record.save(recorded_name(), results).relative_to(record.ROOT)}")


def check_all() -> int:
    """The exit code."""
    known = recorded()
    if known is None:
        print(f"no {recorded_name()}.json: nothing to compare with")
        return 0
    slower = busy = 0
    for case in cases():
        try:
            print(f"as fast as recorded: {_line(check(case, known))}", flush=True)
        except Slower as error:
            slower += 1
            print(f"slower: {error}", flush=True)
        except Busy as error:
            busy += 1
            print(f"no verdict: {error}", flush=True)
    return 1 if slower else 3 if busy else 0


def _line(result: dict[str, Any]) -> str:
    return (
        f"{result['name']}: {result['over_dense']:.3f} of dense attention's time, "
        f"{result['over_heuristic']:.3f} of the heuristic's"
    )
