"""What it costs to cut a long call into the hops of a ring: all shards and all hops, one after another, on one device.

    python -m benchmarks.gpu_hops                      llama32k, 8 shards in zigzag, measure and print
    python -m benchmarks.gpu_hops --record             also write benchmarks/results/gpu_hops.json
    python -m benchmarks.gpu_hops --out DIR            write the run to DIR
    python -m benchmarks.gpu_hops --length 512 --heads 2,1     a small call, anywhere

Each hop runs what it runs in `xsake.sharded_attention(exchange="ring")`: the lists of its rows and keys are cut from the
shard's lists, a kernel computes, and the parts are merged by their lse; in the backward the gradients of keys and values
are summed over the shards. Only the transfers are missing. The uncut call is one `xsake.attention`.
"""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial, reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from rich.console import Console
from rich.table import Table

import xsake
from benchmarks import record
from xsake._exchange import _merged as merged
from xsake._execution import deltas
from xsake._pieces import wide
from xsake._sharded import Options, shard_of
from xsake.autotune.timing import race
from xsake.autotune.workloads import WORKLOADS, Workload

Shards = dict[str, Any]  # arrays with a leading axis of shards, and the mask as RowShards


def cut(query: Array, key: Array, value: Array, mask: xsake.BlockMask, n: int) -> Shards:
    def shards(x: Array) -> Array:
        x = xsake.zigzag(x, n)
        return x.reshape(x.shape[0], n, -1, *x.shape[2:]).swapaxes(0, 1)

    arrays = {"query": query, "key": key, "value": value}
    return {name: shards(x) for name, x in arrays.items()} | {"mask": mask.shard_rows(n, order="zigzag")}


def whole(x: Array) -> Array:
    """The inverse of `cut` for one array."""
    x = x.swapaxes(0, 1)
    return xsake.unzigzag(x.reshape(x.shape[0], -1, *x.shape[3:]), x.shape[1])


def part(given: Shards, own: Array) -> Any:
    arrays = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, own, keepdims=False), given | {"mask": None})
    rows = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, own, 1), given["mask"])
    return shard_of(Options(sequence="shards"), arrays | {"mask": rows}, own)


def hops(given: Shards, own: Array) -> list[tuple[Array, Array, Array]]:
    """The shard whose keys arrive in each hop, with its keys and values."""
    n = len(given["query"])
    holders = [(own - hop) % n for hop in range(n)]
    return [(holder, given["key"][holder], given["value"][holder]) for holder in holders]


def forward_of(given: Shards, own: Array) -> tuple[Array, Array]:
    shard, plan = part(given, own)

    @jax.jit  # every hop is the same program: it is lowered once
    def hop(holder: Array, key: Array, value: Array) -> tuple[Array, Array]:
        out, lse = plan.run_forward(shard.of_keys(key, value, own, holder, transpose=False))
        return wide(out), lse

    out, lse = reduce(merged, [hop(*held) for held in hops(given, own)])
    return out.astype(given["query"].dtype), lse


def backward_of(given: Shards, own: Array, out: Array, lse: Array, d_out: Array) -> tuple[Array, list[Any]]:
    shard, plan = part(given, own)
    _, live = deltas(shard.call, out, lse, d_out, jnp.zeros_like(lse))

    @jax.jit
    def hop(holder: Array, key: Array, value: Array) -> tuple:
        call = shard.of_keys(key, value, own, holder, transpose=True)
        return plan.run_backward(False, call, lse, live, d_out)

    d_query, parts = jnp.zeros((), jnp.float32), []
    for holder, key, value in hops(given, own):
        query, d_key, d_value = hop(holder, key, value)
        d_query = d_query + wide(query)
        parts.append((holder, wide(d_key), wide(d_value)))
    return d_query.astype(given["query"].dtype), parts


def cut_forward(given: Shards) -> tuple[Array, Array]:
    return jax.lax.map(partial(forward_of, given), jnp.arange(len(given["query"])))


def cut_both(given: Shards, d_out: Array) -> tuple[Array, Array, Array]:
    out, lse = cut_forward(given)

    def one(sums: tuple[Array, Array], own: Array) -> tuple[tuple[Array, Array], Array]:
        d_query, parts = backward_of(given, own, out[own], lse[own], d_out[own])
        for holder, *grads in parts:
            sums = tuple(total.at[holder].add(x) for total, x in zip(sums, grads, strict=True))
        return sums, d_query

    zeros = tuple(jnp.zeros(given[name].shape, jnp.float32) for name in ("key", "value"))
    (d_key, d_value), d_query = jax.lax.scan(one, zeros, jnp.arange(len(d_out)))
    return d_query, d_key.astype(given["key"].dtype), d_value.astype(given["value"].dtype)


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
    given = cut(query, key, value, mask, n)
    uncut = {
        "forward": partial(jax.jit(xsake.attention), query, key, value, mask),
        "forward+backward": partial(jax.jit(uncut_both), query, key, value, mask, d_out),
    }
    in_hops = {
        "forward": partial(jax.jit(cut_forward), given),
        "forward+backward": partial(jax.jit(cut_both), given, cut(d_out, d_out, d_out, mask, n)["query"]),
    }
    rows = []
    for direction in uncut:
        result = in_hops[direction]()
        found = whole(result[0]) if direction == "forward" else tuple(map(whole, result))
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
