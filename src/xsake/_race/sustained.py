"""Races on a chip at its power cap: the first calls of a turn, the calls after them, and the state of the chip."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from xsake._race.nvidia_smi import Monitor
from xsake.autotune.measure.timing import Timing, seconds_per_call, turns

PAUSE, BURST, SUSTAINED = 0.1, 0.02, 0.25  # seconds
Contestants = Mapping[str, Callable[[], Any]]


def sustained_race(
    contestants: Contestants, rounds: int, wait: Callable[[Any], Any], monitor: Monitor
) -> dict[str, dict[str, Any]]:
    """Contestants take turns in random order with equal pauses. A turn is timed in two parts: `burst`, its first calls,
    and `sustained`, the calls after them, when the power cap limits the clock; both are a Timing of one run. `chip` is
    the state of the chip during the contestant's turns.
    """
    calls = {}
    for who, run in contestants.items():
        wait(run())
        once = seconds_per_call(run, 2, wait)
        calls[who] = (max(1, round(BURST / once)), max(2, round(SUSTAINED / once)))
    burst: dict[str, list[float]] = {who: [] for who in contestants}
    sustained: dict[str, list[float]] = {who: [] for who in contestants}
    spans: dict[str, list[tuple[float, float]]] = {who: [] for who in contestants}
    for who in turns(contestants, rounds, PAUSE):
        run, (few, many) = contestants[who], calls[who]
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


def sustained_row(found: Mapping[str, Any], calls: int, flops: float) -> dict[str, Any]:
    """The recorded numbers of one contestant of `sustained_race`; a run makes `calls` calls of `flops` operations."""
    times = {kind: found[kind].per_call(calls) for kind in ("burst", "sustained")}
    return {
        **{kind: dataclasses.asdict(time) for kind, time in times.items()},
        "tflops": flops / times["sustained"].median / 1e12,
        "chip": found["chip"],
    }
