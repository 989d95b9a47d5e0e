"""The XLA backend on a CPU against `jax.nn.dot_product_attention`, in one run.

python -m benchmarks.cpu_attention            measure and print
python -m benchmarks.cpu_attention --record   also write benchmarks/results/cpu_attention.json
"""

from __future__ import annotations

import dataclasses
import resource
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from rich.console import Console
from rich.table import Table

import xsake
from benchmarks import record
from benchmarks.harness.interference import contention, disturbance
from xsake.autotune.measure.timing import race
from xsake.autotune.workloads import WORKLOADS, Workload

DIRECTIONS = ("forward", "forward+backward")


def dense(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def sparse(mask: xsake.BlockMask) -> Callable:
    return lambda q, k, v: xsake.attention(q, k, v, mask, implementation="xla")


def compiled(attend: Callable, direction: str, workload: Workload) -> tuple[Callable, int]:
    """A call on random data, and the bytes of temporary memory that the compiler gave it."""
    inputs = workload.inputs(jnp.float32)
    cotangent = jax.random.normal(jax.random.key(9), inputs[0].shape)
    run = attend if direction == "forward" else lambda *x: jax.vjp(attend, *x)[1](cotangent)
    program = jax.jit(run).lower(*inputs).compile()
    return lambda: program(*inputs), program.memory_analysis().temp_size_in_bytes


def comparison(workload: Workload, density: float, direction: str) -> Callable[[], dict[str, Any]]:
    """Compiles the contestants; the function that it returns measures them at each call."""
    mask = workload.mask(density)
    ours, our_bytes = compiled(sparse(mask), direction, workload)
    theirs, their_bytes = compiled(dense, direction, workload)

    def measure() -> dict[str, Any]:
        with contention() as contended:
            times = race({"xsake": ours, "jax.nn": theirs}, rounds=5, min_seconds=0.5)
        return {
            "workload": workload.name,
            "direction": direction,
            "density": float(mask.density()),
            "seconds": {name: dataclasses.asdict(t) for name, t in times.items()},
            "speedup": times["jax.nn"].median / times["xsake"].median,
            "disturbed": disturbance(times, contended),
            "temporary_bytes": {"xsake": our_bytes, "jax.nn": their_bytes},
        }

    return measure


def long_sequence() -> dict[str, Any]:
    """16384 tokens at 10%: dense attention would need 16 GiB of temporaries for its logits alone."""
    workload = WORKLOADS["cpu16k"]
    mask = workload.mask(0.1)
    run, our_bytes = compiled(sparse(mask), "forward+backward", workload)
    times = race({"xsake": run}, rounds=3)
    return {
        "workload": workload.name,
        "direction": "forward+backward",
        "density": float(mask.density()),
        "seconds": {"xsake": dataclasses.asdict(times["xsake"])},
        "temporary_bytes": {"xsake": our_bytes},
        "peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    # The long sequence first: the peak memory of the process is then its own.
    results = [long_sequence()]
    results += [comparison(WORKLOADS["cpu4k"], d, direction)() for d in (0.43, 0.1) for direction in DIRECTIONS]
    table = Table("workload", "direction", "density", "xsake", "jax.nn", "speed-up", "temporary memory")
    for r in results:
        seconds, used = r["seconds"], r["temporary_bytes"]
        table.add_row(
            r["workload"],
            r["direction"],
            f"{r['density']:.1%}",
            f"{seconds['xsake']['median'] * 1e3:.0f} ms",
            f"{seconds['jax.nn']['median'] * 1e3:.0f} ms" if "jax.nn" in seconds else "",
            f"{r['speedup']:.1f}x" if "speedup" in r else "",
            " / ".join(f"{b / 2**20:.0f} MiB" for b in used.values()),
        )
    Console().print(table)
    if "--record" in sys.argv:
        Console().print(f"recorded in {record.save('cpu_attention', results).relative_to(record.ROOT)}")


if __name__ == "__main__":
    main()
