"""Races on a chip at its power cap: the first calls of a turn, the calls after them, and the state of the chip."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from xsake._measure.interference import Contention, contention
from xsake._measure.nvidia_smi import Monitor
from xsake._measure.timing import Timing, in_turns, seconds_per_call

PAUSE, BURST, SUSTAINED = 0.1, 0.02, 0.25  # seconds
Contestants = Mapping[str, Callable[[], Any]]


@dataclasses.dataclass(frozen=True)
class Turn:
    """Seconds per run of a contestant in one turn: in its first calls (`burst`), and after them (`sustained`)."""

    burst: float
    sustained: float
    span: tuple[float, float]  # of time.monotonic, which is the same clock in all processes of a machine
    contended: Contention


class Racer:
    """A compiled contestant, and the number of calls in its turns."""

    def __init__(self, run: Callable[[], Any], wait: Callable[[Any], Any]) -> None:
        wait(run())
        once = seconds_per_call(run, 2, wait)
        self._run, self._wait = run, wait
        self._few, self._many = max(1, round(BURST / once)), max(2, round(SUSTAINED / once))
        self.turn_seconds = (1 + self._few + self._many) * once

    def turn(self) -> Turn:
        self._wait(self._run())
        with contention() as contended:
            start = time.monotonic()
            burst = seconds_per_call(self._run, self._few, self._wait)
            sustained = seconds_per_call(self._run, self._many, self._wait)
            end = time.monotonic()
        return Turn(burst, sustained, (start, end), contended)


def sustained_race(
    contestants: Contestants, rounds: int, wait: Callable[[Any], Any], monitor: Monitor
) -> dict[str, dict[str, Any]]:
    """Contestants take turns in random order with equal pauses; see `raced`."""
    racers = {who: Racer(run, wait) for who, run in contestants.items()}
    return raced(racers, lambda who: racers[who].turn(), rounds, monitor)


def raced(
    contestants: Collection[str], turn: Callable[[str], Turn | None], rounds: int, monitor: Monitor
) -> dict[str, dict[str, Any]]:
    """A race by `turn`, which lets a contestant take its turn, wherever that is; None: the contestant is out.

    `burst` and `sustained` of each contestant are a Timing of one run, `chip` is the state of the chip during the
    contestant's turns, and `contended` is the contention in them.
    """
    found = in_turns(contestants, turn, rounds=rounds, pause=PAUSE)
    whole = {who: [t for t in turns if t is not None] for who, turns in found.items() if None not in turns}
    return {
        who: {
            "burst": Timing.of([t.burst for t in turns]),
            "sustained": Timing.of([t.sustained for t in turns]),
            "chip": monitor.during([t.span for t in turns]),
            "contended": sum((t.contended for t in turns), Contention()),
        }
        for who, turns in whole.items()
    }


def sustained_row(found: Mapping[str, Any], calls: int, flops: float) -> dict[str, Any]:
    """The recorded numbers of one contestant of `sustained_race`; a run makes `calls` calls of `flops` operations."""
    times = {kind: found[kind].per_call(calls) for kind in ("burst", "sustained")}
    return {
        **{kind: dataclasses.asdict(time) for kind, time in times.items()},
        "tflops": flops / times["sustained"].median / 1e12,
        "chip": found["chip"],
    }
