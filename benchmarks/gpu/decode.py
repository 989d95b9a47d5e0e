"""One new token against a long cache: attention alone, dense and sparse, beside cuDNN and the copy bandwidth.

    python -m benchmarks.gpu.decode                     Qwen2.5-1.5B's and Llama 3 8B's heads at 32768 keys, print
    python -m benchmarks.gpu.decode --record            also write benchmarks/results/gpu_decode.json
    python -m benchmarks.gpu.decode --out DIR           write the run to DIR
    python -m benchmarks.gpu.decode --keys 1024 --batches 1 --dense xla    a small run, anywhere

A program is the attention of eight layers, each with a cache of its own, whose queries are the output of the layer
before; times are of one layer. A sparse call attends to one tenth of the blocks of 64 keys, the same number for every
K/V head, at random. `share` is the bytes of the keys and values that a call must read, per second, over the bytes that
a copy of 2 GB reads and writes per second in the same race. The error is against XLA in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
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
from xsake.autotune.measure.timing import race

HEADS = {"qwen2.5-1.5b": (12, 2), "llama3-8b": (32, 8)}
DIM, BLOCK, SPARSE, LAYERS = 128, 64, 0.1, 8


def sparse_mask(batch: int, kv_heads: int, keys: int) -> xsake.BlockMask:
    rng, blocks = np.random.default_rng(0), -(-keys // BLOCK)
    order = rng.random((batch, kv_heads, 1, blocks)).argsort(-1)
    chosen = order < max(1, round(SPARSE * blocks))
    return xsake.BlockMask.from_blocks(chosen, block_q=BLOCK, block_kv=BLOCK, q_len=1, kv_len=keys, transpose=False)


def layers(attention_fn: Callable) -> Callable:
    """One program of all layers; the kernel of a layer is compiled once for all."""
    one = jax.jit(attention_fn)

    @jax.jit
    def run(q: Array, caches: list[tuple[Array, Array]], *mask: Any) -> Array:
        for k, v in caches:
            q = one(q, k, v, *mask)
        return q

    return run


def measure(name: str, batch: int, keys: int, dense: str, copied: int, rounds: int) -> dict[str, Any]:
    q_heads, kv_heads = HEADS[name]
    mask = sparse_mask(batch, kv_heads, keys)

    def array(seed: int, length: int, heads: int) -> Array:
        return jax.random.normal(jax.random.key(seed), (batch, length, heads, DIM), jnp.bfloat16)

    q = array(0, 1, q_heads)
    caches = [(array(2 * i + 1, keys, kv_heads), array(2 * i + 2, keys, kv_heads)) for i in range(LAYERS)]
    errors = {}
    for what, given in (("dense", None), ("sparse", mask)):
        wide = [x.astype(jnp.float32) for x in (q, *caches[0])]
        exact = jax.jit(partial(xsake.attention, implementation="xla"))(*wide, given)
        found = jax.jit(xsake.attention)(q, *caches[0], given).astype(jnp.float32)
        errors[what] = float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))
        del wide
    source = jnp.zeros((copied // 4,), jnp.float32)
    peer = partial(jax.nn.dot_product_attention, implementation=dense)
    contenders: dict[str, Callable[[], Any]] = {
        "dense": partial(layers(xsake.attention), q, caches),
        "sparse": partial(layers(xsake.attention), q, caches, mask),
        f"dense by {dense}": partial(layers(peer), q, caches),
        "copy": partial(jax.jit(lambda x: x + 1), source),
    }
    times = race(contenders, rounds=rounds)
    read = 2 * caches[0][0].nbytes
    seconds = {
        what: dataclasses.asdict(time if what == "copy" else time.per_call(LAYERS)) for what, time in times.items()
    }
    return {
        "heads": name,
        "batch": batch,
        "keys": keys,
        "bytes": {"dense": read, "sparse": read * float(mask.density()), f"dense by {dense}": read, "copy": 2 * copied},
        "errors": errors,
        "seconds": seconds,
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("heads", "batch", "keys", "what", "µs", "quartiles", "share", "times dense", "error")
    for row in rows:
        speed = {name: row["bytes"][name] / time["median"] for name, time in row["seconds"].items()}
        for name, time in row["seconds"].items():
            table.add_row(
                row["heads"],
                str(row["batch"]),
                str(row["keys"]),
                name,
                f"{time['median'] * 1e6:.1f}",
                f"{time['low'] * 1e6:.1f}-{time['high'] * 1e6:.1f}",
                f"{speed[name] / speed['copy']:.2f}",
                f"{row['seconds']['dense']['median'] / time['median']:.2f}",
                f"{row['errors'][name]:.1e}" if name in row["errors"] else "",
            )
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default=",".join(HEADS))
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--keys", type=int, default=32768)
    parser.add_argument("--dense", default="cudnn", choices=["cudnn", "xla"])
    parser.add_argument("--copied", type=int, default=1 << 30, help="bytes of the array that is copied")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.heads.split(","):
        for batch in map(int, args.batches.split(",")):
            rows.append(measure(name, batch, args.keys, args.dense, args.copied, args.rounds))
            if args.record or args.out:
                record.save("gpu_decode", rows, *([args.out] if args.out else []))
    show(rows)


if __name__ == "__main__":
    main()
