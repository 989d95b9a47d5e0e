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

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too

import xsake
from benchmarks.harness.contestants import check_agreement, of_torch
from benchmarks.harness.masks import CALLS, MLA, masks_of, with_small_blocks
from benchmarks.harness.race import run_all
from benchmarks.harness.script import Row, listed, need_gpu, parser
from xsake._measure.nvidia_smi import Monitor
from xsake._race.contestants import dense
from xsake._race.course import DIRECTIONS, FORWARD, Course, compile_all
from xsake._race.sustained import sustained_race, sustained_row

OURS, ANY_ORDER, SMALL_BLOCKS = "xsake", "xsake, any order", "xsake, blocks of 64"


def ours(course: Course, mask: xsake.BlockMask, **options: Any) -> Callable[[], Any]:
    return course.contestant(partial(xsake.attention, **options), mask)


def with_mask(course: Course, mask: xsake.BlockMask, fa4: Any) -> dict[str, Callable[[], Any]]:
    found = {OURS: ours(course, mask)}
    if course.direction != FORWARD:
        found[ANY_ORDER] = ours(course, mask, deterministic=False)
    # Version 4.0.0b36 reads past its memory with a full mask of several sequences, and takes the process with it;
    # its backward for MLA's head dims has tiles of 96 keys, which divide no block of 128.
    crashes = course.workload.batch > 1 and float(mask.density()) == 1.0
    refuses = course.workload is MLA and course.direction != FORWARD
    if fa4 and not crashes and not refuses:
        found["fa4"] = fa4.contestant(course, mask)
    return found


def without_mask(course: Course, fa4: Any) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    if course.workload.value_dim is None:  # jax.nn asks cuDNN for equal head dims only
        found["cudnn dense"] = course.contestant(dense(is_causal=course.workload.is_causal))
    if fa4:
        found["fa4 dense"] = fa4.contestant(course, None)
        if course.direction != FORWARD:
            found["fa4 dense, deterministic"] = fa4.contestant(course, None, deterministic=True)
    return found


class Race:
    """One workload, direction and mask, given by name."""

    def __init__(self, course: Course, name: str, mask: xsake.BlockMask, fa4: Any):
        self.course, self.name, self.workload = course, name, course.workload
        self.contestants = with_mask(course, mask, fa4) | (without_mask(course, fa4) if name == "random 100%" else {})
        self.masks = dict.fromkeys(self.contestants, mask)
        if (small := with_small_blocks(course.workload, name)) is not None:
            self.contestants[SMALL_BLOCKS], self.masks[SMALL_BLOCKS] = ours(course, small), small

    def compiled_by(self, *, torch: bool) -> list[Callable[[], Any]]:
        return [run for who, run in self.contestants.items() if who.startswith("fa4") == torch]

    def check(self) -> None:
        """FlashAttention-4 computes what we do, from the same data: also now, when all contestants have been made."""
        where = f"{self.workload.name}, {self.course.direction}, {self.name}"
        check_agreement(self.contestants, OURS, "fa4", where)

    def run(self, rounds: int, wait: Callable[[Any], Any], monitor: Monitor) -> list[Row]:
        self.check()
        about = {"workload": self.workload.name, "direction": self.course.direction, "mask": self.name}
        flops = {who: self.course.flops(mask) for who, mask in self.masks.items()}
        return [
            about
            | {"density": float(self.masks[who].density()), "implementation": who}
            | sustained_row(found, self.course.calls, flops[who])
            for who, found in sustained_race(self.contestants, rounds, wait, monitor).items()
        ]


def show(found: list[Row]) -> None:
    fa4 = {r["implementation"]: r["tflops"] for r in found if r["implementation"].startswith("fa4")}
    peer = fa4.get("fa4", fa4.get("fa4 dense"))
    for r in found:
        over = f"{r['tflops'] / peer:5.2f} x fa4" if peer else ""
        print(
            f"{r['workload']:10} {r['direction']:16} {r['mask']:22} {r['implementation']:17} "
            f"{r['sustained']['median'] * 1e3:8.3f} ms {r['tflops']:6.0f} TFLOP/s {over} "
            f"burst {r['burst']['median'] * 1e3:8.3f} ms {r['chip'].get('sm_mhz')} MHz",
            flush=True,
        )


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--only", type=listed(among=CALLS), default=[*CALLS])
    options.add_argument("--masks", default="", help="only masks whose names begin with one of these, comma-separated")
    options.add_argument("--seconds", type=float, default=1e9, help="begin no race after so many seconds of races")
    args = options.parse_args()
    need_gpu("benchmarks.gpu.peers")
    start = time.monotonic()
    found, wait = of_torch("fa4")
    races = [
        Race(course, mask_name, mask, found.get("fa4"))
        for workload in (CALLS[name] for name in args.only)
        for course in (Course(workload, direction) for direction in DIRECTIONS)
        for mask_name, mask in masks_of(workload).items()
        if mask_name.startswith(tuple(args.masks.split(",")))
    ]
    compile_all(run for one in races for run in one.compiled_by(torch=False))
    # Afterwards, and in this thread: torch captures graphs, during which nobody else may touch the GPU.
    for run in (run for one in races for run in one.compiled_by(torch=True)):
        run()
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    run_all(races, "gpu_peers", args.out, rounds=args.rounds, wait=wait, show=show, seconds=args.seconds)


if __name__ == "__main__":
    main()
