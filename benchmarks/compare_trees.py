"""Is a change faster? Two checkouts of xsake race, call by call, with the same inputs and masks on one device.

    python -m benchmarks.compare_trees                             this checkout against its last commit
    python -m benchmarks.compare_trees --against REVISION          against another commit
    python -m benchmarks.compare_trees --against FOLDER            against another checkout, where there is no git
    python -m benchmarks.compare_trees --only full16k,gpt4k --masks 'random 100%,lines' --directions forward
    python -m benchmarks.compare_trees --only gpt4k_d64 --length 256 --seconds 0.01       a small run, anywhere

Each checkout has a process of its own, in which everything is compiled before the first race. Calls and masks are those
of `gpu/peers.py`, and so are the turns: in random order, with equal pauses. The ratio is how many times as fast this
checkout is: of every round the ratio of the two turns, of these the median, and in brackets the quartiles. A ratio
whose quartiles lie around 1 says nothing. `results`: whether both compute the same bits; if not, the largest distance
over the norm of any result.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.harness import checkouts
from benchmarks.harness.case import DIRECTIONS
from benchmarks.harness.masks import CALLS
from benchmarks.harness.race import PAUSE
from benchmarks.harness.script import Record, listed, parser, show
from xsake.autotune.measure.timing import Timing

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # two processes share the device

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
    times: dict[str, list[float]] = {name: [] for name in found}
    order, repeats = random.Random(call), max(2, round(seconds / once))
    for _ in range(rounds):
        for name in order.sample(list(found), len(found)):
            time.sleep(PAUSE)
            times[name].append(found[name].seconds_per_call(call, repeats))
    return times


def compared(times: dict[str, list[float]]) -> Timing:
    """How many times as fast this checkout is, round by round."""
    return Timing.of([other / this for this, other in zip(times[THIS], times[OTHER], strict=True)])


def distance(this: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """0 if the results have the same bits, otherwise the largest distance of samples over the norm of any result."""
    if [x["bits"] for x in this] == [x["bits"] for x in other]:
        return 0.0
    pairs = ((a["sample"], b["sample"]) for a, b in zip(this, other, strict=True))
    return max(math.dist(a, b) / (math.hypot(*b) or 1.0) for a, b in pairs)


def main() -> None:
    options = parser(__doc__, rounds=9)
    options.add_argument("--against", default="HEAD", help="a commit, or the folder of another checkout")
    calls = ["llama32k", "full16k", "gpt4k", "gpt4k_d64"]
    options.add_argument("--only", type=listed(among=CALLS), default=calls, help="workloads of gpu/peers.py")
    options.add_argument("--masks", default="random", help="masks whose names begin with one of these")
    options.add_argument("--directions", type=listed(among=DIRECTIONS), default=[*DIRECTIONS])
    options.add_argument("--any-order", action="store_true", help="deterministic=False")
    options.add_argument("--length", type=int, help="tokens, instead of the workload's")
    options.add_argument("--seconds", type=float, default=0.2, help="of each turn")
    args = options.parse_args()
    asked = {name: getattr(args, name) for name in ("only", "masks", "directions", "any_order", "length")}
    rows, lines = Record("compare_trees", args.out, against=args.against), []
    roots = {THIS: record.ROOT}
    with checkouts.checkout(args.against) as other, runners(roots | {OTHER: other}, asked) as found:
        calls_of = {name: runner.calls() for name, runner in found.items()}
        if not calls_of[THIS]:
            raise SystemExit(f"--masks: no mask of {', '.join(args.only)} has a name that begins with {args.masks!r}")
        for number, (this, its) in enumerate(zip(calls_of[THIS], calls_of[OTHER], strict=True)):
            names = {key: this[key] for key in ("workload", "direction", "mask")}
            times = race(found, number, min(this["once"], its["once"]), args.rounds, args.seconds)
            apart = distance(this["results"], its["results"])
            rows.add({**names, "seconds_per_call": times, "apart": apart})
            ratio, medians = compared(times), (Timing.of(times[name]).median for name in (THIS, OTHER))
            ratio_told = f"{ratio.median:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"
            results = f"{apart:.1e} apart" if apart else "same bits"
            lines.append([*names.values(), *(f"{median * 1e3:.3f} ms" for median in medians), ratio_told, results])
            print(*lines[-1], sep="  ", flush=True)
    show(["call", "direction", "mask", "this", args.against, "ratio", "results"], lines)


if __name__ == "__main__":
    main()
