"""Timing that can be trusted: contestants take turns in random order, and the median comes with its quartiles.

A chip at its power cap runs slower after a contestant that heats it: a fixed order favours the contestant after a cool
neighbour. So the order is drawn anew in every round, and every turn begins with the same pause.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call: the median over rounds, and the quartiles around it."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0], 1)
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high, len(seconds))

    def per_call(self, calls: int) -> Timing:
        """Seconds per call, if `calls` calls were timed as one."""
        return Timing(self.median / calls, self.low / calls, self.high / calls, self.rounds)


def race(
    contestants: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 5,
    min_seconds: float = 0.1,
    wait: Callable[[Any], Any] = jax.block_until_ready,
    pause: float | None = None,
) -> dict[str, Timing]:
    """Seconds per call of every contestant; see `race_rounds`."""
    rounds_of = race_rounds(contestants, rounds=rounds, min_seconds=min_seconds, wait=wait, pause=pause)
    return {name: Timing.of(seconds) for name, seconds in rounds_of.items()}


def race_rounds(
    contestants: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 5,
    min_seconds: float = 0.1,
    wait: Callable[[Any], Any] = jax.block_until_ready,
    pause: float | None = None,
) -> dict[str, list[float]]:
    """Seconds per call of every contestant in every round.

    In each round every contestant has one turn, so that drift of the machine affects all of them alike. A turn queues
    enough calls to last `min_seconds` and waits once. The first call of a turn is not timed: the contestant before has
    left its own data in the caches, and on a CPU in the allocator.
    `wait` blocks until a result is ready; contestants of another framework need that framework's function. `pause`:
    seconds before each turn; None means `default_pause()`.
    """
    calls = {}
    for name, run in contestants.items():
        wait(run())
        calls[name] = max(1, round(min_seconds / seconds_per_call(run, 1, wait)))

    def turn(name: str) -> float:
        wait(contestants[name]())
        return seconds_per_call(contestants[name], calls[name], wait)

    return in_turns(contestants, turn, rounds=rounds, pause=default_pause() if pause is None else pause)


def in_turns[T, R](
    contestants: Collection[T],
    turn: Callable[[T], R],
    *,
    rounds: int,
    pause: float,
    order: random.Random | None = None,
) -> dict[T, list[R]]:
    """What `turn` gives of every contestant in every round: the one loop of all races, of `xsake race`, of the tuner,
    of gates and of benchmarks.

    In each round every contestant has one turn, in a new random order, after the same pause in seconds.
    """
    order = order or random.Random(0)
    found: dict[T, list[R]] = {contestant: [] for contestant in contestants}
    for _ in range(rounds):
        for contestant in order.sample(list(contestants), len(contestants)):
            time.sleep(pause)
            found[contestant].append(turn(contestant))
    return found


def default_pause() -> float:
    """Seconds before each turn. A GPU caps its power averaged over some tens of milliseconds; others need no pause."""
    return 0.05 if jax.default_backend() == "gpu" else 0.0


def seconds_per_call(run: Callable[[], Any], calls: int, wait: Callable[[Any], Any] = jax.block_until_ready) -> float:
    """Queue many calls and wait once: the device is never idle between calls, and the host's own time is hidden."""
    start = time.perf_counter()
    for _ in range(calls):
        result = run()
    wait(result)
    return (time.perf_counter() - start) / calls
