"""Block-sparse attention on a Hopper GPU beside FlashAttention-4 and cuDNN, timed fairly on a chip at its power cap.

    python -m benchmarks.gpu.peers                        measure and print
    python -m benchmarks.gpu.peers --record               also write benchmarks/results/gpu_peers_<workload>.json
    python -m benchmarks.gpu.peers --out DIR              write the run, as it grows, to DIR
    python -m benchmarks.gpu.peers --only full16k         some workloads

Contestants take turns in random order with equal pauses. A turn is timed in two parts: its first calls (burst),
and the calls after them (sustained), when the power cap limits the clock. Clocks, power and the reasons for throttling
are noted for each contestant. Masks: random blocks, sink and window, and vertical lines with a sink and a window, which
differ between K/V heads; in `smollm8k` those that HADS chose for eight layers of SmolLM2, side by side as heads of one
call. FlashAttention-4 (benchmarks/README.md says how to install it) gets the same masks; its
backward is not deterministic by default, and with a mask it has no such form on Hopper. Long calls are also raced with
random blocks of 64, which its backward does not take; its forward with such blocks is in `gpu/blocks.py`. HADS chose
blocks of 64, too: FlashAttention-4 gets the blocks of 128 that hold them, and so do we beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import xsake
from benchmarks import record
from benchmarks.gpu import hads_masks
from benchmarks.gpu.attention import BACKWARD_FLOPS, DIRECTIONS, chained_calls, cudnn, in_direction
from benchmarks.harness import turns
from benchmarks.harness.contestant import WORST, relative_difference
from benchmarks.harness.nvidia_smi import Monitor
from xsake.autotune.measure.timing import Timing, seconds_per_call
from xsake.autotune.workloads import WORKLOADS, Workload

PAUSE, BURST, SUSTAINED = 0.1, 0.02, 0.25  # seconds
ODD = Workload(name="odd10k_d96", batch=1, q_heads=16, kv_heads=16, length=10000, head_dim=96, is_causal=True)
MLA = Workload(
    name="mla16k", batch=1, q_heads=16, kv_heads=16, length=16384, head_dim=192, value_dim=128, is_causal=True
)
HADS = Workload(name="smollm8k", batch=1, q_heads=72, kv_heads=24, length=8192, head_dim=64, is_causal=True)
CALLS = {name: WORKLOADS[name] for name in ("llama32k", "full16k", "gpt4k", "gpt4k_d64")} | {
    w.name: w for w in (ODD, MLA, HADS)
}
OURS, ANY_ORDER, SMALL_BLOCKS = "xsake", "xsake, any order", "xsake, blocks of 64"


def masks_of(workload: Workload) -> dict[str, xsake.BlockMask]:
    if workload is ODD:
        return {"random 25%": workload.mask(0.25)}
    if workload is MLA:
        return {f"random {d:.0%}": workload.mask(d) for d in (1.0, 0.43)}
    if workload is HADS:
        chosen = {name: hads_masks.coarse(blocks) for name, blocks in hads_masks.load().items()}
        chosen |= {f"random, as {name}": as_many(blocks) for name, blocks in chosen.items()}
        return {name: of_blocks(workload, blocks, workload.block) for name, blocks in chosen.items()}
    masks = {f"random {d:.0%}": workload.mask(d) for d in (1.0, 0.43, 0.1)}
    if workload.is_causal and workload.length > 8192:
        for sink, window in ((512, 4096), (128, 1024)):
            masks[f"sink {sink}, window {window}"] = xsake.patterns.sink_window(
                workload.length, workload.length, sink=sink, window=window
            )
        masks |= {f"lines {d:.0%}": lines(workload, d) for d in (0.43, 0.2, 0.1)}
    return masks


def lines(workload: Workload, density: float) -> xsake.BlockMask:
    """A sink, a window of four blocks, and vertical lines up to the density; lines differ between K/V heads."""
    n = workload.length // workload.block
    row, column = np.arange(n)[:, None], np.arange(n)[None]
    allowed = column <= row
    heads = []
    for head in range(workload.kv_heads):
        rng = np.random.default_rng(head)
        blocks = ((column == 0) | (row - column < 4)) & allowed
        for line in rng.permutation(n):
            if blocks.sum() >= density * allowed.sum():
                break
            blocks |= (column == line) & allowed
        heads.append(blocks)
    per_query_head = np.repeat(np.stack(heads), workload.q_heads // workload.kv_heads, axis=0)
    return of_blocks(workload, per_query_head, workload.block)


def as_many(blocks: np.ndarray) -> np.ndarray:
    """Random causal blocks: of every head the diagonal and as many others as it has."""
    n, rng, found = blocks.shape[1], np.random.default_rng(0), []
    for head in blocks:
        rest = rng.permutation(np.flatnonzero(np.tri(n, k=-1)))[: np.tril(head).sum() - n]
        found.append(np.isin(np.arange(n * n), rest).reshape(n, n) | np.eye(n, dtype=bool))
    return np.stack(found)


def of_blocks(workload: Workload, blocks: np.ndarray, block: int) -> xsake.BlockMask:
    length = workload.length
    return xsake.BlockMask.from_blocks(
        blocks, block_q=block, block_kv=block, q_len=length, kv_len=length, is_causal=workload.is_causal
    )


def with_small_blocks(workload: Workload, name: str) -> xsake.BlockMask | None:
    """The mask of that name in blocks of 64, where such are raced."""
    kind, _, density = name.partition(" ")
    if kind == "HADS":
        return of_blocks(workload, hads_masks.load()[name], 64)
    if kind not in ("random", "lines") or workload.length <= 8192 or workload in (ODD, MLA):
        return None
    at = dataclasses.replace(workload, block=64)
    part = float(density.rstrip("%")) / 100
    return lines(at, part) if kind == "lines" else at.mask(part)


def race(contestants: dict[str, Callable], rounds: int, wait: Callable, monitor: Monitor) -> dict[str, dict[str, Any]]:
    """Burst and sustained seconds per call of each contestant, and the state of the chip during its turns."""
    calls, order = {}, random.Random(0)
    for who, run in contestants.items():
        wait(run())
        once = seconds_per_call(run, 2, wait)
        calls[who] = (max(1, round(BURST / once)), max(2, round(SUSTAINED / once)))
    burst: dict[str, list[float]] = {who: [] for who in contestants}
    sustained: dict[str, list[float]] = {who: [] for who in contestants}
    spans: dict[str, list[tuple[float, float]]] = {who: [] for who in contestants}
    for _ in range(rounds):
        for who in order.sample(list(contestants), len(contestants)):
            run, (few, many) = contestants[who], calls[who]
            time.sleep(PAUSE)
            wait(run())
            start = time.monotonic()
            burst[who].append(seconds_per_call(run, few, wait))
            sustained[who].append(seconds_per_call(run, many, wait))
            spans[who].append((start, time.monotonic()))
    return {
        who: {
            "burst": Timing.of(burst[who]),
            "sustained": Timing.of(sustained[who]),
            "chip": monitor.during(spans[who]),
        }
        for who in contestants
    }


class Bench:
    """One workload in one direction: its data and its contestants."""

    def __init__(self, workload: Workload, direction: str, fa4: Any):
        self.workload, self.direction, self.fa4 = workload, direction, fa4
        self.inputs = workload.inputs(jnp.bfloat16)
        q, _, v = self.inputs
        self.cotangent = jax.random.normal(jax.random.key(9), (*q.shape[:-1], v.shape[-1]), q.dtype)
        self.calls = chained_calls(workload)

    def ours(self, mask: xsake.BlockMask, **options: Any) -> Callable:
        run = in_direction(
            lambda q, k, v, mask: xsake.attention(q, k, v, mask, **options), self.direction, self.cotangent, self.calls
        )
        return lambda: run(*self.inputs, mask)

    def contestants(self, mask: xsake.BlockMask) -> dict[str, Callable]:
        found = {OURS: self.ours(mask)}
        if self.direction != "forward":
            found[ANY_ORDER] = self.ours(mask, deterministic=False)
        # Version 4.0.0b36 reads past its memory with a full mask of several sequences, and takes the process with it;
        # its backward for MLA's head dims has tiles of 96 keys, which divide no block of 128.
        crashes = self.workload.batch > 1 and float(mask.density()) == 1.0
        refuses = self.workload is MLA and self.direction != "forward"
        if self.fa4 and not crashes and not refuses:
            data = dict(inputs=self.inputs, cotangent=self.cotangent)
            found["fa4"] = self.fa4.contestant(self.workload, mask, self.direction, self.calls, **data)
        return found

    def dense(self) -> dict[str, Callable]:
        found: dict[str, Callable] = {}
        if self.workload.value_dim is None:  # jax.nn asks cuDNN for equal head dims only
            run = in_direction(cudnn(self.workload), self.direction, self.cotangent, self.calls)
            found["cudnn dense"] = lambda: run(*self.inputs)
        if self.fa4:
            found["fa4 dense"] = self.fa4.contestant(self.workload, None, self.direction, self.calls)
            if self.direction != "forward":
                found["fa4 dense, deterministic"] = self.fa4.contestant(
                    self.workload, None, self.direction, self.calls, deterministic=True
                )
        return found


class Race:
    """One workload, direction and mask, given by name."""

    def __init__(self, bench: Bench, name: str, mask: xsake.BlockMask):
        self.bench, self.name = bench, name
        self.contestants = bench.contestants(mask) | (bench.dense() if name == "random 100%" else {})
        self.masks = dict.fromkeys(self.contestants, mask)
        if (small := with_small_blocks(bench.workload, name)) is not None:
            self.contestants[SMALL_BLOCKS], self.masks[SMALL_BLOCKS] = bench.ours(small), small

    def compile(self, *, ours: bool) -> None:
        for who, run in self.contestants.items():
            if who.startswith("fa4") != ours:
                jax.block_until_ready(run())

    def check(self) -> None:
        """FlashAttention-4 computes what we do, from the same data: also now, when all contestants have been made."""
        if "fa4" not in self.contestants:
            return
        ours, theirs = (jax.tree.leaves(self.contestants[who]()) for who in (OURS, "fa4"))
        found = [relative_difference(jnp.from_dlpack(x.detach()), own) for x, own in zip(theirs, ours, strict=True)]
        if not all(difference <= WORST for difference in found):  # NaN is wrong
            where = f"{self.bench.workload.name}, {self.bench.direction}, {self.name}"
            raise ValueError(f"{where}: relative to the norms of our results, FlashAttention-4's differ by {found}")

    def run(self, rounds: int, wait: Callable, monitor: Monitor) -> list[dict[str, Any]]:
        self.check()
        bench = self.bench
        products = BACKWARD_FLOPS if bench.direction != "forward" else 1.0
        flops = {who: bench.workload.flops(mask) * products for who, mask in self.masks.items()}
        return [
            {
                "workload": bench.workload.name,
                "direction": bench.direction,
                "mask": self.name,
                "density": float(self.masks[who].density()),
                "implementation": who,
                **{kind: dataclasses.asdict(found[kind].per_call(bench.calls)) for kind in ("burst", "sustained")},
                "tflops": flops[who] / (found["sustained"].median / bench.calls) / 1e12,
                "chip": found["chip"],
            }
            for who, found in race(self.contestants, rounds, wait, monitor).items()
        ]


def show(console: Console, found: list[dict[str, Any]]) -> None:
    fa4 = {r["implementation"]: r["tflops"] for r in found if r["implementation"].startswith("fa4")}
    peer = fa4.get("fa4", fa4.get("fa4 dense"))
    for r in found:
        over = f"{r['tflops'] / peer:5.2f} x fa4" if peer else ""
        console.print(
            f"{r['workload']:10} {r['direction']:16} {r['mask']:22} {r['implementation']:17} "
            f"{r['sustained']['median'] * 1e3:8.3f} ms {r['tflops']:6.0f} TFLOP/s {over} "
            f"burst {r['burst']['median'] * 1e3:8.3f} ms {r['chip'].get('sm_mhz')} MHz"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default=",".join(CALLS))
    parser.add_argument("--masks", default="", help="only masks whose names begin with one of these, comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no race after so many seconds of races")
    args = parser.parse_args()
    console, start = Console(width=140), time.monotonic()
    if jax.default_backend() != "gpu":
        raise SystemExit("benchmarks.gpu.peers needs an NVIDIA GPU, and JAX sees none")
    fa4, wait = None, jax.block_until_ready
    try:
        from benchmarks.contestants import fa4 as fa4_peer
        from benchmarks.contestants import flex as flex_peer
    except ImportError as error:
        console.print(f"FlashAttention-4 is left out: {error}")
    else:
        fa4, wait = fa4_peer, flex_peer.wait
    races = [
        Race(bench, mask_name, mask)
        for workload in (CALLS[name] for name in args.only.split(","))
        for bench in (Bench(workload, direction, fa4) for direction in DIRECTIONS)
        for mask_name, mask in masks_of(workload).items()
        if mask_name.startswith(tuple(args.masks.split(",")))
    ]
    with console.status("compiling"), ThreadPoolExecutor() as pool:
        for job in [pool.submit(one.compile, ours=True) for one in races]:
            job.result()
        # Afterwards, and in this thread: torch captures graphs, during which nobody else may touch the GPU.
        for one in races:
            one.compile(ours=False)
    console.print(f"compiled in {time.monotonic() - start:.0f} s")
    turns.begin()
    start = time.monotonic()
    results: list[dict[str, Any]] = []
    with Monitor() as monitor:
        for one in races:
            if time.monotonic() - start > args.seconds:
                break
            results += (found := one.run(args.rounds, wait, monitor))
            show(console, found)
            if args.record or args.out:
                name = one.bench.workload.name
                of_workload = [r for r in results if r["workload"] == name]
                record.save(f"gpu_peers_{name}", of_workload, record.RESULTS if args.record else args.out)


if __name__ == "__main__":
    main()
