"""The cost of a first call: seconds until its result is there, outside jit and under jit, at new lengths, beside cuDNN.

    python -m benchmarks.gpu.first_call                  print
    python -m benchmarks.gpu.first_call --record         also write benchmarks/results/gpu_first_call.json
    python -m benchmarks.gpu.first_call --out DIR        write the run to DIR
    python -m benchmarks.gpu.first_call --lengths 64,128 --heads 2 --dense xla      a small run, anywhere

A model's first call pays for tracing, lowering and compiling; so does every new length. `outside jit`: the same call
with the same shapes again must cost no more than its launch. Another length comes first, which pays for what a process
pays only once. Every length is new to the process, and nothing is read from a compilation cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array

import xsake
from benchmarks.harness.script import Record, listed, parser, show
from xsake._race.contestants import dense
from xsake._race.course import BOTH, Course, in_direction
from xsake.autotune.workloads import Workload

AGAIN = 20  # calls of one shape, of which the median counts
WINDOW_BLOCKS = 4


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def ours(block: int, length: int) -> Callable[..., Array]:
    options = dict(sink=block, window=min(length, WINDOW_BLOCKS * block), block_q=block, block_kv=block)
    mask = xsake.patterns.sink_window(length, length, **options)
    return lambda q, k, v: xsake.attention(q, k, v, mask)


def measure(
    attention_at: Callable[[int], Callable[..., Array]], lengths: list[int], heads: int
) -> dict[str, list[float]]:
    """Seconds of each kind of call; of every kind one number per length."""
    found: dict[str, list[float]] = {}
    sizes: dict[str, Any] = dict(batch=1, q_heads=heads, kv_heads=heads, head_dim=128)
    for length in lengths:
        attend = attention_at(length)
        course = Course(Workload(name="first call", length=length, is_causal=True, **sizes), BOTH)
        both = in_direction(attend, BOTH)
        jax.block_until_ready(course.given)
        for what, function, given in (("forward", attend, course.inputs), ("gradient", both, course.given)):
            run = partial(function, *given)
            of_kinds = {
                f"outside jit, first {what}": seconds(run),
                f"outside jit, {what} again": statistics.median(seconds(run) for _ in range(AGAIN)),
                f"jit, first {what}": seconds(partial(jax.jit(function), *given)),
            }
            for kind, value in of_kinds.items():
                found.setdefault(kind, []).append(value)
    return found


def main() -> None:
    options = parser(__doc__, dense=True)
    options.add_argument("--lengths", type=listed(int), default=[4096, 6144, 8192], help="each is new to the process")
    options.add_argument("--heads", type=int, default=16)
    options.add_argument("--block", type=int, default=128)
    args = options.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    rows = Record("gpu_first_call", args.out)
    for who, attention_at in (("xsake", partial(ours, args.block)), (args.dense, lambda _: dense(args.dense))):
        measure(attention_at, [args.lengths[0] // 2], args.heads)  # what a process pays once
        for call, values in measure(attention_at, args.lengths, args.heads).items():
            about = {"implementation": who, "call": call, "lengths": args.lengths, "heads": args.heads}
            rows.add(about | {"seconds": values})
    numbers = (statistics.median, min, max)
    lines = [[r["implementation"], r["call"], *(f"{f(r['seconds']):.4f}" for f in numbers)] for r in rows]
    show(["who", "call", "seconds", "least", "most"], lines)


if __name__ == "__main__":
    main()
