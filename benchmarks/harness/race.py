"""Races on a chip at its power cap: the first calls of a turn, the calls after them, and the state of the chip."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax

from benchmarks.harness import turns
from benchmarks.harness.nvidia_smi import Monitor
from benchmarks.harness.script import Record, Row
from xsake.autotune.measure.timing import Timing, race, seconds_per_call
from xsake.autotune.workloads import Workload

PAUSE, BURST, SUSTAINED = 0.1, 0.02, 0.25  # seconds
Contestants = Mapping[str, Callable[[], Any]]


def timings(contestants: Contestants, rounds: int, calls: int = 1, **options: Any) -> dict[str, dict[str, Any]]:
    """Seconds per call as they are recorded, by `race` of `xsake.autotune`; a program makes `calls` calls."""
    times = race(contestants, rounds=rounds, **options)
    return {who: dataclasses.asdict(time.per_call(calls)) for who, time in times.items()}


def sustained_race(
    contestants: Contestants, rounds: int, wait: Callable[[Any], Any], monitor: Monitor
) -> dict[str, dict[str, Any]]:
    """Contestants take turns in random order with equal pauses. A turn is timed in two parts: `burst`, its first calls,
    and `sustained`, the calls after them, when the power cap limits the clock; both are a Timing of one run. `chip` is
    the state of the chip during the contestant's turns.
    """
    calls, order = {}, random.Random(0)
    for who, run in contestants.items():
        wait(run())
        once = seconds_per_call(run, 2, wait)
        calls[who] = (max(1, round(BURST / once)), max(2, round(SUSTAINED / once)))
    burst: dict[str, list[float]] = {who: [] for who in contestants}
    sustained: dict[str, list[float]] = {who: [] for who in contestants}
    spans: dict[str, list[tuple[float, float]]] = {who: [] for who in contestants}
    for _ in range(rounds):
        for who in order.sample(list(contestants), len(contestants)):
            run, (few, many) = contestants[who], calls[who]
            time.sleep(PAUSE)
            wait(run())
            start = time.monotonic()
            burst[who].append(seconds_per_call(run, few, wait))
            sustained[who].append(seconds_per_call(run, many, wait))
            spans[who].append((start, time.monotonic()))
    return {
        who: {
            "burst": Timing.of(burst[who]),
            "sustained": Timing.of(sustained[who]),
            "chip": monitor.during(spans[who]),
        }
        for who in contestants
    }


def sustained_row(found: Mapping[str, Any], calls: int, flops: float) -> Row:
    """The recorded numbers of one contestant of `sustained_race`; a run makes `calls` calls of `flops` operations."""
    times = {kind: found[kind].per_call(calls) for kind in ("burst", "sustained")}
    return {
        **{kind: dataclasses.asdict(time) for kind, time in times.items()},
        "tflops": flops / times["sustained"].median / 1e12,
        "chip": found["chip"],
    }


class SustainedRace(Protocol):
    """Everything that one call of `sustained_race` compares."""

    workload: Workload

    def run(self, rounds: int, wait: Callable[[Any], Any], monitor: Monitor) -> list[Row]: ...


def run_all(
    races: Iterable[SustainedRace],
    name: str,
    out: Path | None,
    *,
    rounds: int,
    wait: Callable[[Any], Any] = jax.block_until_ready,
    show: Callable[[list[Row]], None],
    seconds: float = float("inf"),
) -> None:
    """Run compiled races in turn, beginning none after so many seconds; a record per workload."""
    turns.begin()
    start = time.monotonic()
    records: dict[str, Record] = {}
    with Monitor() as monitor:
        for one in races:
            if time.monotonic() - start > seconds:
                break
            rows, workload = one.run(rounds, wait, monitor), one.workload.name
            records.setdefault(workload, Record(f"{name}_{workload}", out)).add(*rows)
            show(rows)
