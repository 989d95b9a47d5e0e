"""The XLA backend on a CPU against `jax.nn.dot_product_attention`, in one run.

python -m benchmarks.cpu_attention            measure and print
python -m benchmarks.cpu_attention --record   also write benchmarks/results/cpu_attention.json
"""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from benchmarks.harness.race import timings
from benchmarks.harness.script import Record, Row, parser, show
from xsake._measure.timing import Timing
from xsake._race.contestants import dense, sparse
from xsake._race.course import BOTH, DIRECTIONS, Course
from xsake._race.paired import Paired
from xsake.autotune.workloads import WORKLOADS, Workload

WHO = ("xsake", "jax.nn")


def ours_and_bytes(course: Course, density: float) -> tuple[Callable[[], Any], float, int]:
    """A compiled contestant, its true density, and the bytes of temporary memory that the compiler gave it."""
    mask = course.workload.mask(density)
    run: Any = course.compiled(sparse, mask)
    return run, float(mask.density()), run.func.memory_analysis().temp_size_in_bytes


class Comparison:
    """A workload by XSAKE and by `jax.nn`, compiled."""

    def __init__(self, workload: Workload, density: float, direction: str) -> None:
        course = Course(workload, direction, jnp.float32, calls=1)
        self._ours, true_density, our_bytes = ours_and_bytes(course, density)
        self._theirs: Any = course.compiled(dense("xla"))
        self.temporary_bytes = {"xsake": our_bytes, "jax.nn": self._theirs.func.memory_analysis().temp_size_in_bytes}
        self._about = {"workload": workload.name, "direction": direction, "density": true_density}

    def measure(self) -> Paired:
        return Paired.race(self._ours, self._theirs, rounds=8, round_seconds=0.5)

    def row(self) -> Row:
        paired = self.measure()
        times = dict(zip(WHO, map(Timing.of, (paired.call, paired.reference)), strict=True))
        return {
            **self._about,
            "seconds": {name: dataclasses.asdict(t) for name, t in times.items()},
            "speedup": times["jax.nn"].median / times["xsake"].median,
            "disturbed": paired.disturbed,
            "temporary_bytes": self.temporary_bytes,
        }


def long_sequence() -> Row:
    """16384 tokens at 10%: dense attention would need 16 GiB of temporaries for its logits alone."""
    run, density, used = ours_and_bytes(Course(WORKLOADS["cpu16k"], BOTH, jnp.float32, calls=1), 0.1)
    return {
        "workload": "cpu16k",
        "direction": BOTH,
        "density": density,
        "seconds": timings({"xsake": run}, rounds=3),
        "temporary_bytes": {"xsake": used},
        "peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def line_of(row: Row) -> list[str]:
    times = (f"{row['seconds'][who]['median'] * 1e3:.0f} ms" if who in row["seconds"] else "" for who in WHO)
    speedup = f"{row['speedup']:.1f}x" if "speedup" in row else ""
    used = " / ".join(f"{b / 2**20:.0f} MiB" for b in row["temporary_bytes"].values())
    return [row["workload"], row["direction"], f"{row['density']:.1%}", *times, speedup, used]


def main() -> None:
    rows = Record("cpu_attention", parser(__doc__).parse_args().out)
    rows.add(long_sequence())  # first: the peak memory of the process is then its own
    for density in (0.43, 0.1):
        for direction in DIRECTIONS:
            rows.add(Comparison(WORKLOADS["cpu4k"], density, direction).row())
    columns = ["workload", "direction", "density", *WHO, "speed-up", "temporary memory"]
    show(columns, map(line_of, rows))


if __name__ == "__main__":
    main()
