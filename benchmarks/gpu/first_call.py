"""What a first call costs: seconds until its result is there, outside jit and under jit, at new lengths, beside cuDNN.

    python -m benchmarks.gpu.first_call                  print
    python -m benchmarks.gpu.first_call --record         also write benchmarks/results/gpu_first_call.json
    python -m benchmarks.gpu.first_call --out DIR        write the run to DIR
    python -m benchmarks.gpu.first_call --lengths 64,128 --heads 2 --dense xla      a small run, anywhere

A model's first call pays for tracing, lowering and compiling; so does every new length. `outside jit`: the same call
with the same shapes again must cost no more than its launch. Another length comes first, which pays for what a process
pays only once. Every length is new to the process, and nothing is read from a compilation cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax import Array
from rich.console import Console
from rich.table import Table

import xsake
from benchmarks import record
from benchmarks.gpu.selection import both, inputs

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

    def add(kind: str, value: float) -> None:
        found.setdefault(kind, []).append(value)

    for length in lengths:
        attend, (q, k, v, d_out) = attention_at(length), jax.block_until_ready(inputs(length, heads, heads))
        for what, function, given in (("forward", attend, (q, k, v)), ("gradient", both(attend), (q, k, v, d_out))):
            run = partial(function, *given)
            add(f"outside jit, first {what}", seconds(run))
            add(f"outside jit, {what} again", statistics.median(seconds(run) for _ in range(AGAIN)))
            add(f"jit, first {what}", seconds(partial(jax.jit(function), *given)))
    return found


def show(results: list[dict[str, Any]]) -> None:
    table = Table("who", "call", "seconds", "least", "most")
    for row in results:
        values = row["seconds"]
        table.add_row(row["implementation"], row["call"], *(f"{f(values):.4f}" for f in (statistics.median, min, max)))
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="4096,6144,8192", help="each is new to the process")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--dense", default="cudnn", choices=["cudnn", "xla"])
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    lengths = [int(n) for n in args.lengths.split(",")]

    def dense(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=args.dense)

    results = []
    for who, attention_at in (("xsake", partial(ours, args.block)), (args.dense, lambda _: dense)):
        measure(attention_at, [lengths[0] // 2], args.heads)  # what a process pays once
        results += [
            {"implementation": who, "call": call, "lengths": lengths, "heads": args.heads, "seconds": values}
            for call, values in measure(attention_at, lengths, args.heads).items()
        ]
    show(results)
    if out := record.RESULTS if args.record else args.out:
        record.save("gpu_first_call", results, out)


if __name__ == "__main__":
    main()
