"""Small blocks of queries, packed with the heads of their group, beside blocks that need no packing.

    python -m benchmarks.gpu.packing                     32768 tokens, 32 heads on 4, measure and print
    python -m benchmarks.gpu.packing --record            also write benchmarks/results/gpu_packing.json
    python -m benchmarks.gpu.packing --out DIR           write the run to DIR
    python -m benchmarks.gpu.packing --tokens 256 --heads 8,1 --densities 0.5 --rounds 2    a small run, anywhere

Causal bfloat16 attention with heads of 128 numbers, under random masks that differ between K/V heads and are the same
for all query heads of a group, so that these can be packed. A block of 16 queries fills 128 rows together with the 8
heads of its group; a block of 64 queries fills the rows of a matrix product by itself. Masks of both have the same
share of the blocks that causality allows. TFLOP/s count the pairs of tokens that attend: two products forward, seven
with the backward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import xsake
from benchmarks.harness.contestants import largest_difference
from benchmarks.harness.masks import pairs
from benchmarks.harness.race import timings
from benchmarks.harness.script import Record, Row, listed, parser, show, spread
from xsake._race.contestants import sparse
from xsake._race.course import BOTH, DIRECTIONS, Course, in_direction
from xsake.autotune.workloads import Workload

DIM = 128
BLOCK_Q = (16, 64)
PRODUCTS = dict(zip(DIRECTIONS, (2, 7), strict=True))
COMPARED = 4096  # tokens at most of the comparison with XLA


def mask_of(tokens: int, kv_heads: int, block_q: int, block_kv: int, density: float) -> xsake.BlockMask:
    """A list per K/V head: its query heads share it."""
    sizes = dict(block_q=block_q, block_kv=block_kv, heads=kv_heads)
    return xsake.patterns.random(tokens, tokens, density=density, seed=0, is_causal=True, **sizes)


def error(course: Course, block_q: int, block_kv: int, density: float) -> float:
    """The largest relative error of output and gradients against XLA in float32, over the first tokens."""
    few = [x[:, :COMPARED] for x in (*course.inputs, course.cotangent)]
    mask = mask_of(few[0].shape[1], few[1].shape[2], block_q, block_kv, density)
    by_xla = in_direction(partial(xsake.attention, implementation="xla"), BOTH)
    exact = jax.jit(by_xla)(*(x.astype(jnp.float32) for x in few), mask)
    return largest_difference(jax.jit(in_direction(sparse, BOTH))(*few, mask), exact)


def measure(tokens: int, heads: int, kv_heads: int, block_kv: int, density: float, rounds: int) -> list[Row]:
    """A row per size of query blocks; all of them run in one race."""
    sizes: dict[str, Any] = dict(batch=1, q_heads=heads, kv_heads=kv_heads, length=tokens, head_dim=DIM)
    workload = Workload(name="packing", is_causal=True, **sizes)
    courses = {direction: Course(workload, direction, calls=1) for direction in DIRECTIONS}
    masks = {block_q: mask_of(tokens, kv_heads, block_q, block_kv, density) for block_q in BLOCK_Q}
    contestants = {
        f"{block_q}, {direction}": course.compiled(sparse, mask)
        for block_q, mask in masks.items()
        for direction, course in courses.items()
    }
    times = timings(contestants, rounds)
    rows = []
    for block_q, mask in masks.items():
        operations = 2 * tokens * heads * (keys := pairs(mask)) * DIM
        seconds = {direction: times[f"{block_q}, {direction}"] for direction in DIRECTIONS}
        rows.append(
            {
                "tokens": tokens,
                "heads": heads,
                "kv_heads": kv_heads,
                "block_q": block_q,
                "block_kv": block_kv,
                "asked": density,
                "density": float(mask.density()),
                "keys": keys,
                "error": error(courses[BOTH], block_q, block_kv, density),
                "seconds": seconds,
                "tflops": {d: PRODUCTS[d] * operations / time["median"] / 1e12 for d, time in seconds.items()},
            }
        )
    return rows


def lines_of(row: Row) -> list[list[Any]]:
    about = [row["tokens"], f"{row['heads']} on {row['kv_heads']}", f"{row['block_q']} x {row['block_kv']}"]
    about += [f"{row['density']:.3f}", f"{row['error']:.1e}"]
    return [[*about, d, *spread(time), f"{row['tflops'][d]:.3g}"] for d, time in row["seconds"].items()]


def main() -> None:
    options = parser(__doc__, rounds=7)
    options.add_argument("--tokens", type=int, default=32768)
    options.add_argument("--heads", type=listed(int), default=[32, 4], help="query heads, K/V heads")
    options.add_argument("--block-kv", type=listed(int), default=[64, 128])
    options.add_argument("--densities", type=listed(float), default=[0.43, 0.1])
    args = options.parse_args()
    rows = Record("gpu_packing", args.out)
    for block_kv in args.block_kv:
        for density in args.densities:
            rows.add(*measure(args.tokens, *args.heads, block_kv, density, args.rounds))
    columns = ["tokens", "heads", "block", "density", "error", "direction", "ms", "quartiles", "TFLOP/s"]
    show(columns, [line for row in rows for line in lines_of(row)])


if __name__ == "__main__":
    main()
