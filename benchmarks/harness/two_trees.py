"""The race of two checkouts: a process of each, turns of single calls, and the ratio and distance of what they give."""

from __future__ import annotations

import contextlib
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.harness import checkouts
from xsake._measure.timing import Timing, in_turns
from xsake._race.sustained import PAUSE

THIS, OTHER = "this", "other"


class Runner:
    """The process of one checkout: `harness/tree_runner.py`."""

    def __init__(self, root: Path, asked: dict[str, Any]):
        command = [sys.executable, "-m", "benchmarks.harness.tree_runner", json.dumps(asked)]
        pipes: Any = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._root = root
        self._process = subprocess.Popen(command, cwd=record.ROOT, env=checkouts.environment(root), **pipes)

    def calls(self) -> list[dict[str, Any]]:
        """The calls, once they are compiled: names, results, and the rough seconds of one call."""
        ready = self._hear()
        if not Path(ready["xsake"]).is_relative_to(self._root / "src"):
            raise SystemExit(f"the process of {self._root} has imported {ready['xsake']}, which is not its own")
        return ready["calls"]

    def seconds_per_call(self, call: int, repeats: int) -> float:
        self._process.stdin.write(json.dumps({"call": call, "repeats": repeats}) + "\n")
        self._process.stdin.flush()
        return self._hear()["seconds_per_call"]

    def _hear(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self._root} ended with {self._process.wait()}; what it said is above")
        return json.loads(line)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def runners(roots: dict[str, Path], asked: dict[str, Any]) -> Iterator[dict[str, Runner]]:
    found = {name: Runner(root, asked) for name, root in roots.items()}
    try:
        yield found
    finally:
        for runner in found.values():
            runner.end()


def race(found: dict[str, Runner], call: int, once: float, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds per call of each checkout in every round. `once`: about what one call takes."""
    repeats = max(2, round(seconds / once))

    def turn(name: str) -> float:
        return found[name].seconds_per_call(call, repeats)

    return in_turns(found, turn, rounds=rounds, pause=PAUSE, order=random.Random(call))


def compared(times: dict[str, list[float]]) -> Timing:
    """How many times as fast this checkout is, round by round."""
    return Timing.of([other / this for this, other in zip(times[THIS], times[OTHER], strict=True)])


def distance(this: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """0 if the results have the same bits, otherwise the largest distance of samples over the norm of any result."""
    if [x["bits"] for x in this] == [x["bits"] for x in other]:
        return 0.0
    pairs = ((a["sample"], b["sample"]) for a, b in zip(this, other, strict=True))
    return max(math.dist(a, b) / (math.hypot(*b) or 1.0) for a, b in pairs)
