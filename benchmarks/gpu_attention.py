"""Block-sparse attention on an NVIDIA GPU against its peers, in one run.

    python -m benchmarks.gpu_attention                       measure and print
    python -m benchmarks.gpu_attention --record              also write benchmarks/results/gpu_attention.json
    python -m benchmarks.gpu_attention --out DIR             write the run, as it grows, to DIR
    python -m benchmarks.gpu_attention --only gpt4k,full16k  some workloads

Throughput counts active blocks only (a block on a causal diagonal as half). Peers: cuDNN through jax.nn (dense), and
torch FlexAttention (the same masks) where torch is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too

import jax
import jax.numpy as jnp
from jax import Array
from rich.console import Console
from rich.table import Table

import xsake
from benchmarks import record
from xsake.autotune.timing import Timing, race
from xsake.autotune.workloads import WORKLOADS, Workload

DIRECTIONS = ("forward", "forward+backward")
DENSITIES = (1.0, 0.5, 0.43, 0.25, 0.1)
LONG_DENSITIES = (*DENSITIES, 0.05)
BACKWARD_FLOPS = 3.5


def in_direction(attend: Callable, direction: str, cotangent: Array) -> Callable:
    if direction == "forward":
        return jax.jit(attend)
    return jax.jit(lambda q, k, v, *rest: jax.vjp(lambda *x: attend(*x, *rest), q, k, v)[1](cotangent))


def sparse(q: Array, k: Array, v: Array, mask: xsake.BlockMask) -> Array:
    return xsake.attention(q, k, v, mask)


def cudnn(workload: Workload) -> Callable:
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=workload.is_causal, implementation="cudnn")


def one_shape(make: Callable, asked: float, **kwargs: Any) -> xsake.BlockMask:
    """The mask with room for every block and no density hint: all densities then run one compiled program."""
    mask = make(asked, capacity=make(1.0, **kwargs).capacity, **kwargs)
    return dataclasses.replace(mask, density_hint=None)


def used_bytes(run: Callable, *inputs: Any) -> int:
    memory = run.lower(*inputs).compile().memory_analysis()  # type: ignore[attr-defined]
    return memory.temp_size_in_bytes + memory.output_size_in_bytes + memory.argument_size_in_bytes


class Run:
    """One recorded run, written after every measurement: a stopped run keeps what it has."""

    def __init__(self, out: Path | None, console: Console):
        self.results: list[dict[str, Any]] = []
        self.out, self.console = out, console

    def add(self, workload: Workload, direction: str, who: str, timing: Timing, flops: float, **extra: Any) -> None:
        flops *= BACKWARD_FLOPS if direction != "forward" else 1.0
        entry = {
            "workload": workload.name,
            "direction": direction,
            "implementation": who,
            "seconds": dataclasses.asdict(timing),
            "tflops": flops / timing.median / 1e12,
            **extra,
        }
        self.results.append(entry)
        asked = f"{extra['asked']:.0%}" if "asked" in extra else "dense"
        self.console.print(
            f"{workload.name:10} {direction:17} {who:14} {asked:>6} {timing.median * 1e3:9.3f} ms "
            f"{entry['tflops']:7.1f} TFLOP/s"
        )
        if self.out is not None:
            record.save("gpu_attention", self.results, self.out)


def measure(run: Run, workload: Workload, direction: str, flex: Any, rounds: int) -> None:
    q, k, v = workload.inputs(jnp.bfloat16)
    cotangent = jax.random.normal(jax.random.key(9), q.shape, q.dtype)
    wait = flex.wait if flex else jax.block_until_ready

    dense = in_direction(cudnn(workload), direction, cotangent)
    ours = in_direction(sparse, direction, cotangent)
    bytes_used = {"cudnn": used_bytes(dense, q, k, v)}
    for asked in LONG_DENSITIES if workload.length > 8192 else DENSITIES:
        mask = one_shape(workload.mask, asked)
        contestants = {"xsake": lambda mask=mask: ours(q, k, v, mask), "cudnn": lambda: dense(q, k, v)}
        if flex:
            contestants["flex"] = flex.contestant(workload, mask, direction)
        bytes_used["xsake"] = used_bytes(ours, q, k, v, mask)
        times = race(contestants, rounds=rounds, min_seconds=0.05, wait=wait)
        for who, timing in times.items():
            flops = workload.flops(None if who == "cudnn" else mask)
            extra = {"asked": asked, "density": float(mask.density()), "bytes": bytes_used.get(who)}
            run.add(workload, direction, who, timing, flops, **extra)


def measure_uneven(run: Run, workload: Workload, direction: str, rounds: int) -> None:
    """Heads from 10% to 90% against a uniform mask with the same number of active blocks."""
    q, k, v = workload.inputs(jnp.bfloat16)
    cotangent = jax.random.normal(jax.random.key(9), q.shape, q.dtype)
    ours = in_direction(sparse, direction, cotangent)
    uneven, uniform = workload.uneven_mask(), workload.mask(0.5)
    contestants = {"uneven": lambda: ours(q, k, v, uneven), "uniform": lambda: ours(q, k, v, uniform)}
    for who, timing in race(contestants, rounds=rounds, min_seconds=0.05).items():
        mask = uneven if who == "uneven" else uniform
        run.add(workload, direction, f"xsake {who}", timing, workload.flops(mask), density=float(mask.density()))


def measure_small_blocks(run: Run, workload: Workload, direction: str, rounds: int) -> None:
    """Mask blocks of 64."""
    q, k, v = workload.inputs(jnp.bfloat16)
    cotangent = jax.random.normal(jax.random.key(9), q.shape, q.dtype)
    ours = in_direction(sparse, direction, cotangent)
    for asked in (1.0, 0.43, 0.1):
        mask = one_shape(workload.mask, asked, block=64)
        timing = race({"xsake": lambda mask=mask: ours(q, k, v, mask)}, rounds=rounds, min_seconds=0.05)["xsake"]
        extra = {"asked": asked, "density": float(mask.density())}
        run.add(workload, direction, "xsake block 64", timing, workload.flops(mask), **extra)


def measure_memory(run: Run, workload: Workload) -> None:
    """Bytes of forward and backward together, against unfused attention in XLA."""
    q, k, v = workload.inputs(jnp.bfloat16)
    cotangent = jax.random.normal(jax.random.key(9), q.shape, q.dtype)
    mask = workload.mask(0.43)
    unfused = in_direction(
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla"),
        DIRECTIONS[1],
        cotangent,
    )
    ours = in_direction(sparse, DIRECTIONS[1], cotangent)
    used = {"xsake": used_bytes(ours, q, k, v, mask), "xla dense": used_bytes(unfused, q, k, v)}
    run.results.append(
        {"workload": workload.name, "direction": DIRECTIONS[1], "implementation": "memory", "bytes": used}
    )
    run.console.print(f"{workload.name}: bytes of forward+backward {used}, {used['xsake'] / used['xla dense']:.1%}")


def summary(results: list[dict[str, Any]]) -> Table:
    """Throughput over cuDNN's dense one, and over FlexAttention's at the same mask; all measured side by side."""
    table = Table("workload", "direction", "density", "xsake", "cuDNN dense", "over cuDNN", "flex", "over flex")
    by = {(r["workload"], r["direction"], r["implementation"], r.get("asked")): r for r in results}
    for (workload, direction, who, asked), ours in by.items():
        if who != "xsake":
            continue
        dense, flex = by[workload, direction, "cudnn", asked], by.get((workload, direction, "flex", asked))
        table.add_row(
            workload,
            direction,
            f"{asked:.0%}",
            f"{ours['tflops']:.0f}",
            f"{dense['tflops']:.0f}",
            f"{ours['tflops'] / dense['tflops']:.2f}",
            f"{flex['tflops']:.0f}" if flex else "",
            f"{ours['tflops'] / flex['tflops']:.2f}x" if flex else "",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="gpt4k,gpt4k_d64,llama32k,full16k")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-flex", action="store_true")
    args = parser.parse_args()

    console = Console(width=140)
    if jax.default_backend() != "gpu":
        raise SystemExit("benchmarks.gpu_attention needs an NVIDIA GPU, and JAX sees none")
    flex = None
    if not args.no_flex:
        try:
            from benchmarks import flex_peer as flex  # type: ignore[no-redef]
        except ImportError as error:
            console.print(f"FlexAttention is left out: {error}")
    run = Run(record.RESULTS if args.record else args.out, console)
    for name in args.only.split(","):
        for direction in DIRECTIONS:
            measure(run, WORKLOADS[name], direction, flex, args.rounds)
            measure_small_blocks(run, WORKLOADS[name], direction, args.rounds)
            if name in ("llama32k", "full16k"):
                measure_uneven(run, WORKLOADS[name], direction, args.rounds)
        if name == "gpt4k":
            measure_memory(run, WORKLOADS[name])
    if run.out is not None:
        record.save("gpu_attention", run.results, run.out)
    console.print(summary(run.results))


if __name__ == "__main__":
    main()
