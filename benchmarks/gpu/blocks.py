"""The cost of small mask blocks on a Hopper GPU, beside others that take them, timed fairly on a chip at its power cap.

    python -m benchmarks.gpu.blocks --record               measure, write benchmarks/results/gpu_blocks_<workload>.json
    python -m benchmarks.gpu.blocks --out DIR              write the run, as it grows, to DIR
    python -m benchmarks.gpu.blocks --only full16k         some workloads
    python -m benchmarks.gpu.blocks --alone --record       without others: gpu_blocks_alone_<workload>.json

Masks of one density with blocks of 16 to 128 keys: the smaller the blocks, the better they fit what matters, and the
less each copy and each product does. They are random, or, with 32768 tokens, also like HADS's. Contestants
take turns as in `gpu/peers.py`. FlashAttention-4 takes blocks under 128 keys in its forward alone, FastVideo's kernels
(ThunderKittens) blocks of 64 x 64 without causality; both are raced where they are installed (benchmarks/README.md says
how) and agree with the result of our forward.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too

import jax.numpy as jnp

from benchmarks.harness.contestants import WORST, of_torch, relative_difference, told
from benchmarks.harness.masks import hads_like
from benchmarks.harness.race import run_all
from benchmarks.harness.script import Row, listed, need_gpu, parser
from xsake._measure.nvidia_smi import Monitor
from xsake._race.contestants import sparse
from xsake._race.course import DIRECTIONS, FORWARD, Course, compile_all
from xsake._race.sustained import sustained_race, sustained_row
from xsake.autotune.workloads import WORKLOADS, Workload
from xsake.hads.mask.block_mask import BlockMask

DENSITY = 0.1
BLOCKS = {  # queries x keys
    "llama32k": ((128, 128), (128, 64), (64, 64), (128, 32), (64, 32), (128, 16), (64, 16)),
    "full16k": ((128, 128), (64, 64)),
}


MASKS: dict[str, Callable[[Workload, float], BlockMask]] = {"random": Workload.mask, "HADS-like": hads_like}


class Race:
    """One workload, direction and kind of mask: every contestant with every shape of blocks that it takes."""

    def __init__(self, name: str, direction: str, kind: str, peers: dict[str, ModuleType]):
        self.workload, self.kind = WORKLOADS[name], kind
        self.course = Course(self.workload, direction)
        self.masks = {
            (q, kv): MASKS[kind](dataclasses.replace(self.workload, block=q, block_kv=kv), DENSITY)
            for q, kv in BLOCKS[name]
        }
        self.runs = {("xsake", blocks): self.course.contestant(sparse, mask) for blocks, mask in self.masks.items()}
        self.left_out: list[Row] = []
        ours = compile_all(self.runs.values())
        for (blocks, mask), result in zip(self.masks.items(), ours, strict=True):
            takes = {
                "fa4": direction == FORWARD or blocks == (128, 128),
                "fastvideo": blocks == (64, 64) and not self.workload.is_causal,
            }
            for who, peer in peers.items():
                if takes[who]:
                    self.enter(who, blocks, result, partial(peer.contestant, self.course, mask))

    def enter(self, who: str, blocks: tuple[int, int], ours: Any, make: Callable[[], Callable[[], Any]]) -> None:
        """Races the peer if it runs and, forward, agrees with us."""
        try:
            run = make()
            found = run()
            if self.course.direction == FORWARD:
                out = jnp.asarray(found.detach().float().cpu().numpy())
                out = out.swapaxes(1, 2) if who == "fastvideo" else out
                if not (difference := relative_difference(out, ours)) <= WORST:
                    raise ValueError(f"relative to the norm of our result, its result differs by {difference:.1e}")
        except Exception as error:  # whatever another library raises
            self.left_out.append(self.about(who, blocks) | {"why": told(error)})
        else:
            self.runs[who, blocks] = run

    def about(self, who: str, blocks: tuple[int, int]) -> Row:
        return {
            "workload": self.workload.name,
            "direction": self.course.direction,
            "mask": self.kind,
            "implementation": who,
            "block_q": blocks[0],
            "block_kv": blocks[1],
            "density": float(self.masks[blocks].density()),
        }

    def run(self, rounds: int, wait: Callable[[Any], Any], monitor: Monitor) -> list[Row]:
        flops = {blocks: self.course.flops(mask) for blocks, mask in self.masks.items()}
        named = {f"{who} {q} x {kv}": run for (who, (q, kv)), run in self.runs.items()}
        raced = sustained_race(named, rounds, wait, monitor).values()
        return self.left_out + [
            self.about(who, blocks) | sustained_row(found, self.course.calls, flops[blocks])
            for (who, blocks), found in zip(self.runs, raced, strict=True)
        ]


def show(found: list[Row]) -> None:
    for r in found:
        said = r.get("why") or f"{r['sustained']['median'] * 1e3:8.3f} ms {r['tflops']:6.0f} TFLOP/s"
        blocks = f"{r['block_q']:3} x {r['block_kv']:<3}"
        print(
            f"{r['workload']:9} {r['direction']:16} {r['mask']:9} {blocks} {r['implementation']:10} {said}", flush=True
        )


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--only", type=listed(among=BLOCKS), default=[*BLOCKS])
    options.add_argument("--directions", type=listed(among=DIRECTIONS), default=[*DIRECTIONS])
    options.add_argument("--alone", action="store_true", help="race our kernels alone")
    args = options.parse_args()
    need_gpu("benchmarks.gpu.blocks")
    start = time.monotonic()
    peers, wait = of_torch(*(() if args.alone else ("fa4", "fastvideo")))
    races = [
        Race(name, direction, kind, peers)
        for name, direction, kind in itertools.product(args.only, reversed(args.directions), MASKS)
        if kind == "random" or WORKLOADS[name].is_causal
    ]
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    run_all(
        races, "gpu_blocks_alone" if args.alone else "gpu_blocks", args.out, rounds=args.rounds, wait=wait, show=show
    )


if __name__ == "__main__":
    main()
