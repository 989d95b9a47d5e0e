"""What it costs to cut a long call into the hops of a ring: all shards and all hops, one after another, on one device.

    python -m benchmarks.gpu.hops                      llama32k, 8 shards in zigzag, measure and print
    python -m benchmarks.gpu.hops --record             also write benchmarks/results/gpu_hops.json
    python -m benchmarks.gpu.hops --out DIR            write the run to DIR
    python -m benchmarks.gpu.hops --length 512 --heads 2,1     a small call, anywhere

Each hop runs what it runs in `xsake.sharded_attention(exchange="ring")`: the lists of its rows and keys are cut from
the shard's lists, a kernel computes, and the parts are merged by their lse; in the backward the gradients of keys and
values are summed over the shards. Only the transfers are missing. The uncut call is one `xsake.attention`.
"""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from rich.console import Console
from rich.table import Table

import xsake
from benchmarks import record
from xsake._op.pieces import wide
from xsake._sequence.exchange import merge
from xsake._sequence.sharded import Options, shard_of
from xsake.autotune.measure.timing import race
from xsake.autotune.workloads import WORKLOADS, Workload
from xsake.backend.delta import DeltaParts

OPTIONS = Options(sequence="shards")
Shards = list[dict[str, Any]]  # what each shard holds: query, key, value, and its part of the mask


def cut(x: Array, n: int) -> list[Array]:
    return jnp.split(xsake.zigzag(x, n), n, axis=1)


def whole(parts: list[Array]) -> Array:
    return xsake.unzigzag(jnp.concatenate(parts, 1), len(parts))


def shards_of(query: Array, key: Array, value: Array, mask: xsake.BlockMask, n: int) -> Shards:
    rows = mask.shard_rows(n, order="zigzag")
    parts = zip(*(cut(x, n) for x in (query, key, value)), strict=True)
    return [
        {"query": q, "key": k, "value": v, "mask": jax.tree.map(lambda x, i=i: x[i : i + 1], rows)}
        for i, (q, k, v) in enumerate(parts)
    ]


def held_in(shards: Shards, own: int, hop: int) -> dict[str, Any]:
    return shards[(own - hop) % len(shards)]


def cut_forward(shards: Shards) -> list[tuple[Array, Array]]:
    @jax.jit  # every shard runs the same program: it is lowered once
    def prepare(arrays: dict, own: Array) -> list:
        shard, _ = shard_of(OPTIONS, arrays, own)
        return shard.rows.hops(own, transpose=False)

    @partial(jax.jit, static_argnums=0)
    def run(first: bool, arrays: dict, own: Array, key: Array, value: Array, hop: tuple) -> tuple[Array, Array]:
        shard, plan = shard_of(OPTIONS, arrays, own)
        out, lse = plan.run_forward(shard.of_hop(0 if first else 1, key, value, *hop))
        return wide(out), lse

    results = []
    for i, arrays in enumerate(shards):
        own = jnp.int32(i)
        parts = []
        for hop, masks in enumerate(prepare(arrays, own)):
            held = held_in(shards, i, hop)
            parts.append(run(hop == 0, arrays, own, held["key"], held["value"], masks))
        out, lse = merge(parts)
        results.append((out.astype(arrays["query"].dtype), lse))
    return results


def cut_both(shards: Shards, d_out: list[Array]) -> tuple[list[Array], ...]:
    @jax.jit
    def prepare(arrays: dict, own: Array, out: Array, lse: Array, d_out: Array) -> tuple:
        shard, _ = shard_of(OPTIONS, arrays, own)
        live = DeltaParts(out, None).of_live_rows(shard.call.q_segments, lse, d_out)
        return live, shard.rows.hops(own, transpose=True)

    @partial(jax.jit, static_argnums=0)
    def run(first: bool, arrays: dict, own: Array, key: Array, value: Array, hop: tuple, *given: Array) -> tuple:
        shard, plan = shard_of(OPTIONS, arrays, own)
        grads = plan.run_backward(False, shard.of_hop(0 if first else 1, key, value, *hop), *given)
        return tuple(map(wide, grads))

    d_query: list[Any] = [0.0] * len(shards)
    d_key, d_value = d_query.copy(), d_query.copy()
    for i, (arrays, (out, lse)) in enumerate(zip(shards, cut_forward(shards), strict=True)):
        own = jnp.int32(i)
        live, hops = prepare(arrays, own, out, lse, d_out[i])
        for hop, masks in enumerate(hops):
            held, holder = held_in(shards, i, hop), (i - hop) % len(shards)
            query, key, value = run(hop == 0, arrays, own, held["key"], held["value"], masks, lse, live, d_out[i])
            d_query[i] += query
            d_key[holder] += key
            d_value[holder] += value
    return tuple([x.astype(d_out[0].dtype) for x in grads] for grads in (d_query, d_key, d_value))


def uncut_both(query: Array, key: Array, value: Array, mask: xsake.BlockMask, d_out: Array) -> Any:
    _, backward = jax.vjp(lambda *qkv: xsake.attention(*qkv, mask), query, key, value)
    return backward(d_out)


def difference(one: Any, other: Any) -> float:
    def of(a: Array, b: Array) -> float:
        a, b = (x.astype(jnp.float32) for x in (a, b))
        return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))

    return max(map(of, jax.tree.leaves(one), jax.tree.leaves(other)))


def measure(workload: Workload, density: float, n: int, rounds: int) -> list[dict[str, Any]]:
    query, key, value = workload.inputs(jnp.bfloat16)
    mask = workload.mask(density)
    d_out = jax.random.normal(jax.random.key(1), query.shape, query.dtype)
    shards = shards_of(query, key, value, mask, n)
    uncut = {
        "forward": partial(jax.jit(xsake.attention), query, key, value, mask),
        "forward+backward": partial(jax.jit(uncut_both), query, key, value, mask, d_out),
    }
    in_hops = {
        "forward": partial(jax.jit(cut_forward), shards),
        "forward+backward": partial(jax.jit(cut_both), shards, cut(d_out, n)),
    }
    rows = []
    for direction in uncut:
        result = in_hops[direction]()
        found = whole([out for out, _ in result]) if direction == "forward" else tuple(map(whole, result))
        error = difference(found, uncut[direction]())
        times = race({"uncut": uncut[direction], "hops": in_hops[direction]}, rounds=rounds)
        rows.append(
            {
                "workload": workload.name,
                "density": density,
                "shards": n,
                "direction": direction,
                "difference": error,
                "seconds": {name: dataclasses.asdict(t) for name, t in times.items()},
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="llama32k")
    parser.add_argument("--length", type=int)
    parser.add_argument("--heads", help="query heads, K/V heads")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--densities", default="1,0.43,0.1")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    workload = WORKLOADS[args.workload]
    if args.length:
        workload = dataclasses.replace(workload, length=args.length)
    if args.heads:
        workload = dataclasses.replace(
            workload, **dict(zip(("q_heads", "kv_heads"), map(int, args.heads.split(",")), strict=True))
        )
    rows: list[dict[str, Any]] = []
    table = Table("density", "direction", "uncut, ms", f"{args.shards} hops, ms", "ratio", "difference")
    for density in map(float, args.densities.split(",")):
        rows += measure(workload, density, args.shards, args.rounds)
        for row in rows[-2:]:
            uncut, hops_ = (row["seconds"][name]["median"] for name in ("uncut", "hops"))
            table.add_row(
                f"{density:.0%}",
                row["direction"],
                f"{uncut * 1e3:.2f}",
                f"{hops_ * 1e3:.2f}",
                f"{hops_ / uncut:.2f}",
                f"{row['difference']:.1e}",
            )
        if args.record or args.out:
            record.save("gpu_hops", rows, *([args.out] if args.out else []))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
