"""Block-sparse attention on an NVIDIA GPU against its peers, in one run.

    python -m benchmarks.gpu.attention                       measure and print
    python -m benchmarks.gpu.attention --record              also write benchmarks/results/gpu_attention.json
    python -m benchmarks.gpu.attention --out DIR             write the run, as it grows, to DIR
    python -m benchmarks.gpu.attention --only gpt4k,full16k  some workloads

Throughput counts active blocks only (a block on a causal diagonal as half). Peers: cuDNN through jax.nn and JAX's own
Pallas kernels (dense), and torch FlexAttention (the same masks) where torch is installed. Calls that take less
time than Python needs to launch them are chained, eight per program (torch: per CUDA graph), for all peers alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from benchmarks.harness import turns
from xsake.autotune.measure.chain import chain
from xsake.autotune.measure.timing import Timing, race
from xsake.autotune.workloads import WORKLOADS, Workload

DIRECTIONS = ("forward", "forward+backward")
DENSITIES = (1.0, 0.5, 0.43, 0.25, 0.1)
LONG_DENSITIES = (*DENSITIES, 0.05)
SMALL_BLOCK_DENSITIES = (1.0, 0.43, 0.25, 0.1)
BACKWARD_FLOPS = 3.5


def chained_calls(workload: Workload) -> int:
    return 8 if workload.length <= 8192 else 1


def in_direction(attend: Callable, direction: str, cotangent: Array, calls: int = 1) -> Callable:
    if direction == "forward":
        return chain(attend, calls)

    def both(q: Array, k: Array, v: Array, cotangent: Array, *rest: Any) -> tuple:
        return jax.vjp(lambda *x: attend(*x, *rest), q, k, v)[1](cotangent)

    run = chain(both, calls)
    return lambda q, k, v, *rest: run(q, k, v, cotangent, *rest)


def sparse(q: Array, k: Array, v: Array, mask: xsake.BlockMask) -> Array:
    return xsake.attention(q, k, v, mask)


def cudnn(workload: Workload) -> Callable:
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=workload.is_causal, implementation="cudnn")


def one_shape(workload: Workload, make: Callable, **kwargs: Any) -> xsake.BlockMask:
    """The mask with room for every block and no density hint: all masks of a workload then run one compiled program."""
    block = kwargs.get("block", workload.block)
    n = -(-workload.length // block)
    capacity = n * (n + 1) // 2 if workload.is_causal else n * n
    return dataclasses.replace(make(capacity=capacity, **kwargs), density_hint=None)


def used_bytes(run: Callable, *inputs: Any) -> int:
    memory = jax.jit(run).lower(*inputs).compile().memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes + memory.argument_size_in_bytes


class Run:
    """One recorded run, written after every measurement: a stopped run keeps its measurements."""

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
        asked = f"{extra['asked']:.0%}" if "asked" in extra else f"{extra['density']:.0%}"
        self.console.print(
            f"{workload.name:10} {direction:17} {who:14} {asked:>6} {timing.median * 1e3:9.3f} ms "
            f"{entry['tflops']:7.1f} TFLOP/s"
        )
        self.save()

    def save(self) -> None:
        if self.out is not None:
            record.save("gpu_attention", self.results, self.out)


class Bench:
    """One workload in one direction: its data, its masks and its contestants."""

    def __init__(self, workload: Workload, direction: str):
        self.workload, self.direction = workload, direction
        self.inputs = workload.inputs(jnp.bfloat16)
        self.cotangent = jax.random.normal(jax.random.key(9), self.inputs[0].shape, self.inputs[0].dtype)
        self.calls = chained_calls(workload)
        self.dense = self.contestant(cudnn(workload))
        self.ours = self.contestant(sparse)
        densities = LONG_DENSITIES if workload.length > 8192 else DENSITIES
        self.masks = {d: one_shape(workload, workload.mask, density=d) for d in densities}
        self.small = {d: one_shape(workload, workload.mask, density=d, block=64) for d in SMALL_BLOCK_DENSITIES}
        self.uneven = one_shape(workload, workload.uneven_mask)

    def contestant(self, attend: Callable) -> Callable:
        return in_direction(attend, self.direction, self.cotangent, self.calls)

    def race(self, contestants: dict[str, Callable], rounds: int, wait: Callable = jax.block_until_ready) -> dict:
        times = race(contestants, rounds=rounds, min_seconds=0.04, wait=wait)
        return {who: timing.per_call(self.calls) for who, timing in times.items()}

    def compile(self) -> None:
        """Compile before anything is timed; several benches compile side by side."""
        jax.block_until_ready(self.dense(*self.inputs))
        for mask in (self.masks[1.0], self.small[1.0]):
            jax.block_until_ready(self.ours(*self.inputs, mask))

    def measure(self, run: Run, flex: Any, rounds: int) -> None:
        w, wait = self.workload, flex.wait if flex else jax.block_until_ready
        for asked, mask in self.masks.items():
            contestants: dict[str, Callable] = {
                "xsake": lambda mask=mask: self.ours(*self.inputs, mask),
                "cudnn": lambda: self.dense(*self.inputs),
            }
            if flex:
                contestants["flex"] = flex.contestant(w, mask, self.direction, self.calls)
            if asked == 1.0 and self.direction == "forward":
                contestants |= self.pallas_peers(run.console)
            for who, timing in self.race(contestants, rounds, wait).items():
                flops = w.flops(None if who == "cudnn" else mask)
                run.add(w, self.direction, who, timing, flops, asked=asked, density=float(mask.density()))
        for asked, mask in self.small.items():
            times = self.race({"xsake": lambda mask=mask: self.ours(*self.inputs, mask)}, rounds)
            extra = {"asked": asked, "density": float(mask.density())}
            run.add(w, self.direction, "xsake block 64", times["xsake"], w.flops(mask), **extra)

    def pallas_peers(self, console: Console) -> dict[str, Callable]:
        from benchmarks.contestants.pallas import contestants

        able: dict[str, Callable] = {}
        for who, (attend, dtype) in contestants(self.workload).items():
            peer = self.contestant(attend)
            inputs = [x.astype(dtype) for x in self.inputs]
            try:
                jax.block_until_ready(peer(*inputs))
            except Exception as error:  # another project's kernel: whatever it raises, the others are measured
                console.print(f"{who} is left out on {self.workload.name}: {str(error)[:200]}")
            else:
                able[who] = lambda peer=peer, inputs=inputs: peer(*inputs)
        return able

    def measure_uneven(self, run: Run, rounds: int) -> None:
        """Heads from 10% to 90% against a uniform mask of about as many blocks; compare time per block."""
        masks = {"xsake uneven": self.uneven, "xsake uniform": self.masks[0.5]}
        contestants = {who: lambda mask=mask: self.ours(*self.inputs, mask) for who, mask in masks.items()}
        for who, timing in self.race(contestants, rounds).items():
            flops, density = self.workload.flops(masks[who]), float(masks[who].density())
            run.add(self.workload, self.direction, who, timing, flops, density=density)

    def measure_memory(self, run: Run) -> None:
        """Bytes of forward and backward together, against unfused attention in XLA."""
        unfused = in_direction(
            lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla"),
            self.direction,
            self.cotangent,
        )
        ours = in_direction(sparse, self.direction, self.cotangent)
        used = {
            "xsake": used_bytes(ours, *self.inputs, self.masks[0.43]),
            "xla dense": used_bytes(unfused, *self.inputs),
        }
        run.results.append(
            {"workload": self.workload.name, "direction": self.direction, "implementation": "memory", "bytes": used}
        )
        run.console.print(f"{self.workload.name}: bytes {used}, {used['xsake'] / used['xla dense']:.1%}")


def summary(results: list[dict[str, Any]]) -> Table:
    """Our throughput over cuDNN's dense throughput, and over FlexAttention's with the same mask, in the same race."""
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
        raise SystemExit("benchmarks.gpu.attention needs an NVIDIA GPU, and JAX sees none")
    flex = None
    if not args.no_flex:
        try:
            from benchmarks.contestants import flex  # type: ignore[no-redef]
        except ImportError as error:
            console.print(f"FlexAttention is left out: {error}")
    run = Run(record.RESULTS if args.record else args.out, console)
    benches = [Bench(WORKLOADS[name], direction) for name in args.only.split(",") for direction in DIRECTIONS]
    with console.status("compiling"), ThreadPoolExecutor() as pool:
        compiled = [pool.submit(bench.compile) for bench in benches]
        if flex:  # in this thread: torch compiles one program at a time
            for bench in benches:
                flex.contestant(bench.workload, bench.masks[1.0], bench.direction, 1)()
        for job in compiled:
            job.result()
    turns.begin()
    for bench in benches:
        bench.measure(run, flex, args.rounds)
        if bench.workload.length > 8192:
            bench.measure_uneven(run, args.rounds)
        if (bench.workload.name, bench.direction) == ("gpt4k", DIRECTIONS[1]):
            bench.measure_memory(run)
    run.save()
    console.print(summary(run.results))


if __name__ == "__main__":
    main()
