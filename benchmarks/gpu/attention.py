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

import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too

import jax

import xsake
from benchmarks.harness import turns
from benchmarks.harness.contestants import of_torch
from benchmarks.harness.race import timings
from benchmarks.harness.script import Record, listed, need_gpu, parser, show
from xsake._race.contestants import dense, sparse
from xsake._race.course import BOTH, DIRECTIONS, FORWARD, Course
from xsake.autotune.workloads import WORKLOADS, Workload

DENSITIES = (1.0, 0.5, 0.43, 0.25, 0.1)
LONG_DENSITIES = (*DENSITIES, 0.05)
SMALL_BLOCK_DENSITIES = (1.0, 0.43, 0.25, 0.1)


def one_shape(workload: Workload, make: Callable[..., xsake.BlockMask], **options: Any) -> xsake.BlockMask:
    """The mask with room for every block and no density hint: all masks of a workload then run one compiled program."""
    n = -(-workload.length // options.get("block", workload.block))
    capacity = n * (n + 1) // 2 if workload.is_causal else n * n
    return dataclasses.replace(make(capacity=capacity, **options), density_hint=None)


class Bench:
    """One course: its masks and its contestants."""

    def __init__(self, workload: Workload, direction: str):
        self.course, self.workload = Course(workload, direction), workload
        self.dense = self.course.contestant(dense(is_causal=workload.is_causal))
        self._ours = self.course.program(sparse)
        densities = LONG_DENSITIES if workload.length > 8192 else DENSITIES
        self.masks = {d: one_shape(workload, workload.mask, density=d) for d in densities}
        self.small = {d: one_shape(workload, workload.mask, density=d, block=64) for d in SMALL_BLOCK_DENSITIES}
        self.uneven = one_shape(workload, workload.uneven_mask)

    def ours(self, mask: xsake.BlockMask) -> Callable[[], Any]:
        return partial(self._ours, *self.course.given, mask)

    def compile(self) -> None:
        """Compile before anything is timed; several benches compile side by side."""
        for run in (self.dense, self.ours(self.masks[1.0]), self.ours(self.small[1.0])):
            jax.block_until_ready(run())

    def measure(self, rows: Record, rounds: int, flex: Any, wait: Callable[[Any], Any]) -> None:
        for asked, mask in self.masks.items():
            contestants = {"xsake": self.ours(mask), "cudnn": self.dense}
            if flex:
                contestants["flex"] = flex.contestant(self.course, mask)
            if asked == 1.0 and self.course.direction == FORWARD:
                contestants |= self.pallas_peers()
            flops = {"cudnn": self.course.flops()}
            self.race(rows, contestants, dict.fromkeys(contestants, mask), rounds, flops, wait=wait, asked=asked)
        for asked, mask in self.small.items():
            self.race(rows, {"xsake block 64": self.ours(mask)}, {"xsake block 64": mask}, rounds, asked=asked)
        if self.workload.length > 8192:
            # Heads from 10% to 90% against a uniform mask of about as many blocks; compare time per block.
            masks = {"xsake uneven": self.uneven, "xsake uniform": self.masks[0.5]}
            self.race(rows, {who: self.ours(mask) for who, mask in masks.items()}, masks, rounds)
        if (self.workload.name, self.course.direction) == ("gpt4k", BOTH):
            self.measure_memory(rows)

    def race(
        self,
        rows: Record,
        contestants: dict[str, Callable[[], Any]],
        masks: dict[str, xsake.BlockMask],
        rounds: int,
        flops: dict[str, float] | None = None,
        wait: Callable[[Any], Any] = jax.block_until_ready,
        **asked: float,
    ) -> None:
        """A row per contestant; `flops` are of those that do not compute their mask's blocks alone."""
        options: dict[str, Any] = dict(min_seconds=0.04, wait=wait)
        about = {"workload": self.workload.name, "direction": self.course.direction}
        for who, seconds in timings(contestants, rounds, self.course.calls, **options).items():
            operations = (flops or {}).get(who, self.course.flops(masks[who]))
            row = {"implementation": who, "seconds": seconds, "tflops": operations / seconds["median"] / 1e12}
            rows.add({**about, **row, **asked, "density": float(masks[who].density())})
            told = f"{seconds['median'] * 1e3:9.3f} ms {row['tflops']:7.1f} TFLOP/s"
            share = f"{rows[-1].get('asked', rows[-1]['density']):.0%}"
            print(f"{self.workload.name:10} {self.course.direction:17} {who:14} {share:>6} {told}", flush=True)

    def pallas_peers(self) -> dict[str, Callable[[], Any]]:
        from benchmarks.contestants import pallas

        able: dict[str, Callable[[], Any]] = {}
        for who, (attend, dtype) in pallas.contestants(self.workload).items():
            peer = Course(self.workload, self.course.direction, dtype).contestant(attend)
            try:
                jax.block_until_ready(peer())
            except Exception as error:  # another project's kernel: whatever it raises, the others are measured
                print(f"{who} is left out on {self.workload.name}: {str(error)[:200]}", flush=True)
            else:
                able[who] = peer
        return able

    def measure_memory(self, rows: Record) -> None:
        """Bytes of forward and backward together, against unfused attention in XLA."""
        once = Course(self.workload, self.course.direction, calls=1)
        used = {
            "xsake": used_bytes(once.compiled(sparse, self.masks[0.43])),
            "xla dense": used_bytes(once.compiled(dense("xla"))),
        }
        about = {"workload": self.workload.name, "direction": self.course.direction}
        rows.add({**about, "implementation": "memory", "bytes": used})
        print(f"{self.workload.name}: bytes {used}, {used['xsake'] / used['xla dense']:.1%}", flush=True)


def used_bytes(contestant: Any) -> int:
    memory = contestant.func.memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes + memory.argument_size_in_bytes


def summary(rows: Record) -> None:
    """Our throughput over cuDNN's dense throughput, and over FlexAttention's with the same mask, in the same race."""
    by = {(r["workload"], r["direction"], r["implementation"], r.get("asked")): r.get("tflops") for r in rows}
    lines = []
    for (workload, direction, who, asked), ours in by.items():
        if who == "xsake":
            cudnn, flex = (by.get((workload, direction, peer, asked)) for peer in ("cudnn", "flex"))
            ratios = [cell for x in (cudnn, flex) for cell in ((f"{x:.0f}", f"{ours / x:.2f}") if x else ("", ""))]
            lines.append([workload, direction, f"{asked:.0%}", f"{ours:.0f}", *ratios])
    show(["workload", "direction", "density", "xsake", "cuDNN dense", "over cuDNN", "flex", "over flex"], lines)


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--only", type=listed(among=WORKLOADS), default=["gpt4k", "gpt4k_d64", "llama32k", "full16k"])
    options.add_argument("--no-flex", action="store_true")
    args = options.parse_args()
    need_gpu("benchmarks.gpu.attention")
    found, wait = of_torch(*([] if args.no_flex else ["flex"]))
    flex = found.get("flex")
    rows = Record("gpu_attention", args.out)
    benches = [Bench(WORKLOADS[name], direction) for name in args.only for direction in DIRECTIONS]
    with ThreadPoolExecutor() as pool:
        compiled = [pool.submit(bench.compile) for bench in benches]
        if flex:  # in this thread: torch compiles one program at a time
            for bench in benches:
                flex.contestant(Course(bench.workload, bench.course.direction, calls=1), bench.masks[1.0])()
        for job in compiled:
            job.result()
    turns.begin()
    for bench in benches:
        bench.measure(rows, args.rounds, flex, wait)
    summary(rows)


if __name__ == "__main__":
    main()
