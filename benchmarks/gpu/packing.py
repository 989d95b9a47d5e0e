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

import argparse
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console
from rich.table import Table

import xsake
from benchmarks import record
from benchmarks.gpu.selection import DIRECTIONS
from benchmarks.harness.contestant import relative_difference
from xsake.autotune.measure.timing import race

DIM = 128
BLOCK_Q = (16, 64)
PRODUCTS = {"forward": 2, "forward+backward": 7}
COMPARED = 4096  # tokens at most of the comparison with XLA


def inputs(tokens: int, heads: int, kv_heads: int) -> tuple[Array, Array, Array, Array]:
    """(query, key, value, cotangent of the output)."""

    def array(seed: int, n: int) -> Array:
        return jax.random.normal(jax.random.key(seed), (1, tokens, n, DIM), jnp.bfloat16)

    return array(0, heads), array(1, kv_heads), array(2, kv_heads), array(3, heads)


def mask_of(tokens: int, kv_heads: int, block_q: int, block_kv: int, density: float) -> xsake.BlockMask:
    """A list per K/V head: its query heads share it."""
    sizes = dict(block_q=block_q, block_kv=block_kv, heads=kv_heads)
    return xsake.patterns.random(tokens, tokens, density=density, seed=0, is_causal=True, **sizes)


def pairs(mask: xsake.BlockMask) -> float:
    """Keys that a query attends, on average over queries and heads."""
    token, first = np.arange(mask.q_len)[:, None], np.arange(mask.num_kv_blocks)[None] * mask.block_kv
    keys = np.clip(np.minimum(token + 1, mask.kv_len) - first, 0, mask.block_kv)
    of_blocks = np.add.reduceat(keys, np.arange(0, mask.q_len, mask.block_q), axis=0)
    return float((np.asarray(mask.to_blocks()) * of_blocks).sum() / (mask.batch * mask.heads * mask.q_len))


def attend(query: Array, key: Array, value: Array, mask: xsake.BlockMask) -> Array:
    return xsake.attention(query, key, value, mask)


def error(given: tuple[Array, ...], block_q: int, block_kv: int, density: float) -> float:
    """Of output and gradients of the first tokens, against XLA in float32, relative to the norm: the largest."""
    few = [x[:, :COMPARED] for x in given]
    mask = mask_of(few[0].shape[1], few[1].shape[2], block_q, block_kv, density)
    by_xla = partial(xsake.attention, implementation="xla")
    wide = [x.astype(jnp.float32) for x in few]
    exact = jax.tree.leaves(jax.jit(DIRECTIONS["forward+backward"](by_xla))(*wide, mask))
    found = jax.tree.leaves(jax.jit(DIRECTIONS["forward+backward"](attend))(*few, mask))
    return max(relative_difference(a, b) for a, b in zip(found, exact, strict=True))


def measure(tokens: int, heads: int, kv_heads: int, block_kv: int, density: float, rounds: int) -> list[dict[str, Any]]:
    """A row per size of query blocks; all of them run in one race."""
    query, key, value, d_out = given = inputs(tokens, heads, kv_heads)
    masks = {block_q: mask_of(tokens, kv_heads, block_q, block_kv, density) for block_q in BLOCK_Q}
    programs: dict[str, Any] = {}
    for block_q, mask in masks.items():
        for direction, wrap in DIRECTIONS.items():
            arrays = (query, key, value, mask) if direction == "forward" else (query, key, value, d_out, mask)
            compiled = jax.jit(wrap(attend)).lower(*arrays).compile()
            programs[f"{block_q}, {direction}"] = partial(compiled, *arrays)
    times = race(programs, rounds=rounds)
    rows = []
    for block_q, mask in masks.items():
        keys = pairs(mask)
        seconds = {direction: dataclasses.asdict(times[f"{block_q}, {direction}"]) for direction in DIRECTIONS}
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
                "error": error(given, block_q, block_kv, density),
                "seconds": seconds,
                "tflops": {
                    direction: 2 * PRODUCTS[direction] * tokens * heads * keys * DIM / time["median"] / 1e12
                    for direction, time in seconds.items()
                },
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("tokens", "heads", "block", "density", "error", "direction", "ms", "quartiles", "TFLOP/s")
    for row in rows:
        for direction, time in row["seconds"].items():
            table.add_row(
                str(row["tokens"]),
                f"{row['heads']} on {row['kv_heads']}",
                f"{row['block_q']} x {row['block_kv']}",
                f"{row['density']:.3f}",
                f"{row['error']:.1e}",
                direction,
                f"{time['median'] * 1e3:.2f}",
                f"{time['low'] * 1e3:.2f}-{time['high'] * 1e3:.2f}",
                f"{row['tflops'][direction]:.3g}",
            )
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", default="32,4", help="query heads, K/V heads")
    parser.add_argument("--block-kv", default="64,128")
    parser.add_argument("--densities", default="0.43,0.1")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    heads, kv_heads = map(int, args.heads.split(","))
    rows: list[dict[str, Any]] = []
    for block_kv in map(int, args.block_kv.split(",")):
        for density in map(float, args.densities.split(",")):
            rows += measure(args.tokens, heads, kv_heads, block_kv, density, args.rounds)
            if args.record or args.out:
                record.save("gpu_packing", rows, *([args.out] if args.out else []))
    show(rows)


if __name__ == "__main__":
    main()
