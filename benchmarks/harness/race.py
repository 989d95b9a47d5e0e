"""Races that the scripts record: one record per workload, as they are run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import jax

from benchmarks.harness import turns
from benchmarks.harness.script import Record, Row
from xsake._measure import nvidia_smi
from xsake._measure.nvidia_smi import Monitor
from xsake._measure.timing import race
from xsake._race.sustained import Contestants
from xsake.autotune.workloads import Workload


def timings(contestants: Contestants, rounds: int, calls: int = 1, **options: Any) -> dict[str, dict[str, Any]]:
    """Seconds per call as they are recorded, by `race` of `xsake.autotune`; a program makes `calls` calls."""
    times = race(contestants, rounds=rounds, **options)
    return {who: dataclasses.asdict(time.per_call(calls)) for who, time in times.items()}


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
    with Monitor(nvidia_smi.gpu_of_this_process()) as monitor:
        for one in races:
            if time.monotonic() - start > seconds:
                break
            rows, workload = one.run(rounds, wait, monitor), one.workload.name
            records.setdefault(workload, Record(f"{name}_{workload}", out)).add(*rows)
            show(rows)
