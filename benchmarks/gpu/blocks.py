"""What small mask blocks cost on a Hopper GPU, beside others that take them, timed fairly on a chip at its power cap.

    python -m benchmarks.gpu.blocks --record               measure, write benchmarks/results/gpu_blocks_<workload>.json
    python -m benchmarks.gpu.blocks --out DIR              write the run, as it grows, to DIR
    python -m benchmarks.gpu.blocks --only full16k         some workloads

Random masks of one density with blocks of 16 to 128 keys: the smaller the blocks, the better they fit what matters, and
the less each copy and each product does. Contestants take turns as in `gpu/peers.py`. FlashAttention-4 takes blocks
under 128 keys in its forward alone, FastVideo's kernels (ThunderKittens) blocks of 64 x 64 without causality; both are
raced where they are installed (benchmarks/README.md says how) and agree with the result of our forward.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too

import jax
import jax.numpy as jnp
from rich.console import Console

from benchmarks import record
from benchmarks.gpu.attention import BACKWARD_FLOPS, DIRECTIONS
from benchmarks.gpu.peers import Bench, race
from benchmarks.harness import turns
from benchmarks.harness.contestant import WORST, relative_difference, told
from benchmarks.harness.nvidia_smi import Monitor
from xsake.autotune.workloads import WORKLOADS

DENSITY = 0.1
BLOCKS = {  # queries x keys
    "llama32k": ((128, 128), (128, 64), (64, 64), (128, 32), (64, 32), (128, 16), (64, 16)),
    "full16k": ((128, 128), (64, 64)),
}
Contestant = tuple[str, tuple[int, int]]  # who, with which blocks


class Race:
    """One workload and direction: every contestant with every shape of blocks that it takes."""

    def __init__(self, name: str, direction: str, peers: dict[str, Any]):
        self.workload, self.direction, self.peers = WORKLOADS[name], direction, peers
        self.bench = Bench(self.workload, direction, None)
        self.masks = {
            blocks: dataclasses.replace(self.workload, block=blocks[0], block_kv=blocks[1]).mask(DENSITY)
            for blocks in BLOCKS[name]
        }
        self.runs: dict[Contestant, Callable[[], Any]] = {}
        self.left_out: list[dict[str, Any]] = []

    def compile(self, pool: ThreadPoolExecutor) -> None:
        self.runs = {("xsake", blocks): self.bench.ours(mask) for blocks, mask in self.masks.items()}
        ours = pool.map(lambda run: jax.block_until_ready(run()), self.runs.values())
        forward, inputs, calls = self.direction == "forward", self.bench.inputs, self.bench.calls
        for (blocks, mask), result in zip(self.masks.items(), list(ours), strict=True):
            if fa4 := self.peers.get("fa4") if forward or blocks == (128, 128) else None:
                entry = partial(fa4.contestant, self.workload, mask, self.direction, calls, inputs=inputs)
                self.enter("fa4", blocks, result, entry)
            if fastvideo := self.peers.get("fastvideo") if blocks == (64, 64) and not self.workload.is_causal else None:
                entry = partial(fastvideo.contestant, mask, self.direction, calls, inputs=inputs)
                self.enter("fastvideo", blocks, result, entry)

    def enter(self, who: str, blocks: tuple[int, int], ours: Any, make: Callable[[], Callable[[], Any]]) -> None:
        """Races the peer if it runs and, forward, agrees with us; its gradients are those of another cotangent."""
        try:
            run = make()
            found = run()
            if self.direction == "forward":
                out = jnp.asarray(found.detach().float().cpu().numpy())
                out = out.swapaxes(1, 2) if who == "fastvideo" else out
                if not (difference := relative_difference(out, ours)) <= WORST:
                    raise ValueError(f"relative to the norm of our result, its result differs by {difference:.1e}")
        except Exception as error:  # whatever another library raises
            self.left_out.append(self.about(who, blocks) | {"why": told(error)})
        else:
            self.runs[who, blocks] = run

    def about(self, who: str, blocks: tuple[int, int]) -> dict[str, Any]:
        return {
            "workload": self.workload.name,
            "direction": self.direction,
            "implementation": who,
            "block_q": blocks[0],
            "block_kv": blocks[1],
            "density": float(self.masks[blocks].density()),
        }

    def run(self, rounds: int, wait: Callable, monitor: Monitor) -> list[dict[str, Any]]:
        products = BACKWARD_FLOPS if self.direction != "forward" else 1.0
        flops = {blocks: self.workload.flops(mask) * products for blocks, mask in self.masks.items()}
        named = {f"{who} {q} x {kv}": run for (who, (q, kv)), run in self.runs.items()}
        found = race(named, rounds, wait, monitor).values()
        calls = self.bench.calls
        return self.left_out + [
            self.about(who, blocks)
            | {kind: dataclasses.asdict(times[kind].per_call(calls)) for kind in ("burst", "sustained")}
            | {"tflops": flops[blocks] * calls / times["sustained"].median / 1e12, "chip": times["chip"]}
            for (who, blocks), times in zip(self.runs, found, strict=True)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default=",".join(BLOCKS))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    console, start = Console(width=140), time.monotonic()
    if jax.default_backend() != "gpu":
        raise SystemExit("benchmarks.gpu.blocks needs an NVIDIA GPU, and JAX sees none")
    peers = {}
    for name in ("fa4", "fastvideo"):
        try:
            peers[name] = importlib.import_module(f"benchmarks.contestants.{name}")
        except ImportError as error:
            console.print(f"{name} is left out: {error}")
    wait = importlib.import_module("benchmarks.contestants.flex").wait if peers else jax.block_until_ready
    races = [Race(name, direction, peers) for name in args.only.split(",") for direction in reversed(DIRECTIONS)]
    with console.status("compiling"), ThreadPoolExecutor() as pool:
        for one in races:
            one.compile(pool)
    console.print(f"compiled in {time.monotonic() - start:.0f} s")
    turns.begin()
    results: list[dict[str, Any]] = []
    with Monitor() as monitor:
        for one in races:
            results += (found := one.run(args.rounds, wait, monitor))
            for r in found:
                said = r.get("why") or f"{r['sustained']['median'] * 1e3:8.3f} ms {r['tflops']:6.0f} TFLOP/s"
                console.print(
                    f"{r['workload']:9} {r['direction']:16} {r['block_q']:3} x {r['block_kv']:<3} "
                    f"{r['implementation']:10} {said}"
                )
            if args.record or args.out:
                name = one.workload.name
                of_workload = [r for r in results if r["workload"] == name]
                record.save(f"gpu_blocks_{name}", of_workload, record.RESULTS if args.record else args.out)


if __name__ == "__main__":
    main()
