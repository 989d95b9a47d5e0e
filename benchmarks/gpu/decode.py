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

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import xsake
from benchmarks.harness.contestants import relative_difference
from benchmarks.harness.script import Record, Row, listed, parser, show, spread
from xsake._measure.timing import race
from xsake._race.contestants import dense
from xsake.autotune.workloads import Workload

HEADS = {"qwen2.5-1.5b": (12, 2), "llama3-8b": (32, 8)}
DIM, BLOCK, SPARSE, LAYERS = 128, 64, 0.1, 8


def sparse_mask(batch: int, kv_heads: int, keys: int) -> xsake.BlockMask:
    rng, blocks = np.random.default_rng(0), -(-keys // BLOCK)
    order = rng.random((batch, kv_heads, 1, blocks)).argsort(-1)
    chosen = order < max(1, round(SPARSE * blocks))
    return xsake.BlockMask.from_blocks(chosen, block_q=BLOCK, block_kv=BLOCK, q_len=1, kv_len=keys, transpose=False)


def layers(attention_fn: Callable[..., Array]) -> Callable[..., Array]:
    """One program of all layers; the kernel of a layer is compiled once for all."""
    one = jax.jit(attention_fn)

    @jax.jit
    def run(q: Array, caches: list[tuple[Array, Array]], *mask: Any) -> Array:
        for k, v in caches:
            q = one(q, k, v, *mask)
        return q

    return run


def measure(name: str, batch: int, keys: int, by: str, copied: int, rounds: int) -> Row:
    q_heads, kv_heads = HEADS[name]
    sizes: dict[str, Any] = dict(batch=batch, q_heads=q_heads, kv_heads=kv_heads, head_dim=DIM)
    token = Workload(name=name, length=1, kv_length=keys, is_causal=False, **sizes)
    mask = sparse_mask(batch, kv_heads, keys)
    q, *first = token.inputs(jnp.bfloat16)
    caches = [tuple(first), *(token.inputs(jnp.bfloat16, seed)[1:] for seed in range(1, LAYERS))]
    errors = {}
    for what, given in (("dense", None), ("sparse", mask)):
        wide = [x.astype(jnp.float32) for x in (q, *first)]
        exact = jax.jit(partial(xsake.attention, implementation="xla"))(*wide, given)
        errors[what] = relative_difference(jax.jit(xsake.attention)(q, *first, given), exact)
        del wide
    source = jnp.zeros((copied // 4,), jnp.float32)
    contestants: dict[str, Callable[[], Any]] = {
        "dense": partial(layers(xsake.attention), q, caches),
        "sparse": partial(layers(xsake.attention), q, caches, mask),
        f"dense by {by}": partial(layers(dense(by, is_causal=False)), q, caches),
        "copy": partial(jax.jit(lambda x: x + 1), source),
    }
    read = 2 * first[0].nbytes
    times = race(contestants, rounds=rounds)
    layered = {what: time if what == "copy" else time.per_call(LAYERS) for what, time in times.items()}
    return {
        "heads": name,
        "batch": batch,
        "keys": keys,
        "bytes": {"dense": read, "sparse": read * float(mask.density()), f"dense by {by}": read, "copy": 2 * copied},
        "errors": errors,
        "seconds": {what: dataclasses.asdict(time) for what, time in layered.items()},
    }


def lines_of(row: Row) -> list[list[Any]]:
    seconds, errors, lines = row["seconds"], row["errors"], []
    speed = {name: row["bytes"][name] / time["median"] for name, time in seconds.items()}
    for name, time in seconds.items():
        ratios = f"{speed[name] / speed['copy']:.2f}", f"{seconds['dense']['median'] / time['median']:.2f}"
        error = f"{errors[name]:.1e}" if name in errors else ""
        lines.append([row["heads"], row["batch"], row["keys"], name, *spread(time, 1e6, 1), *ratios, error])
    return lines


def main() -> None:
    options = parser(__doc__, rounds=7, dense=True)
    options.add_argument("--heads", type=listed(among=HEADS), default=[*HEADS])
    options.add_argument("--batches", type=listed(int), default=[1, 8, 32])
    options.add_argument("--keys", type=int, default=32768)
    options.add_argument("--copied", type=int, default=1 << 30, help="bytes of the array that is copied")
    args = options.parse_args()
    rows = Record("gpu_decode", args.out)
    for name in args.heads:
        for batch in args.batches:
            rows.add(measure(name, batch, args.keys, args.dense, args.copied, args.rounds))
    columns = ["heads", "batch", "keys", "what", "µs", "quartiles", "share", "times dense", "error"]
    show(columns, [line for row in rows for line in lines_of(row)])


if __name__ == "__main__":
    main()
