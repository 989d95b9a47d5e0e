"""The cost of cutting a long call into the hops of a ring: all shards and all hops, one after another, on one device.

    python -m benchmarks.gpu.hops                      llama32k, 8 shards in zigzag, measure and print
    python -m benchmarks.gpu.hops --record             also write benchmarks/results/gpu_hops.json
    python -m benchmarks.gpu.hops --out DIR            write the run to DIR
    python -m benchmarks.gpu.hops --length 512 --heads 2,1 --shards 2     a small call, anywhere

Each hop runs what it runs in `xsake.sharded_attention(exchange="ring")`: the lists of its rows and keys are cut from
the shard's lists, a kernel computes, and the parts are merged by their lse; in the backward the gradients of keys and
values are summed over the shards. Only the transfers are missing. The uncut call is one `xsake.attention`.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import xsake
from benchmarks.harness.contestants import largest_difference
from benchmarks.harness.race import timings
from benchmarks.harness.script import Record, Row, listed, parser, show
from xsake._race.contestants import sparse
from xsake._race.course import DIRECTIONS, FORWARD, Course
from xsake._rewrites.head_pieces import wide
from xsake._sequence.exchange import merge
from xsake._sequence.sharded import Options, shard_of
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


def measure(workload: Workload, direction: str, density: float, n: int, rounds: int) -> Row:
    course, mask = Course(workload, direction, calls=1), workload.mask(density)
    shards = shards_of(*course.inputs, mask, n)
    uncut = course.contestant(sparse, mask)
    if direction == FORWARD:
        hops = partial(jax.jit(cut_forward), shards)
        found: Any = whole([out for out, _ in hops()])
    else:
        hops = partial(jax.jit(cut_both), shards, cut(course.cotangent, n))
        found = tuple(map(whole, hops()))
    return {
        "workload": workload.name,
        "density": density,
        "shards": n,
        "direction": direction,
        "difference": largest_difference(found, uncut()),
        "seconds": timings({"uncut": uncut, "hops": hops}, rounds),
    }


def line_of(row: Row) -> list[str]:
    uncut, hops = (row["seconds"][name]["median"] for name in ("uncut", "hops"))
    times = [f"{uncut * 1e3:.2f}", f"{hops * 1e3:.2f}", f"{hops / uncut:.2f}"]
    return [f"{row['density']:.0%}", row["direction"], *times, f"{row['difference']:.1e}"]


def main() -> None:
    options = parser(__doc__, rounds=7)
    options.add_argument("--workload", choices=WORKLOADS, default="llama32k")
    options.add_argument("--length", type=int)
    options.add_argument("--heads", type=listed(int), help="query heads, K/V heads")
    options.add_argument("--shards", type=int, default=8)
    options.add_argument("--densities", type=listed(float), default=[1.0, 0.43, 0.1])
    args = options.parse_args()
    changes = {"length": args.length} if args.length else {}
    changes |= dict(zip(("q_heads", "kv_heads"), args.heads, strict=True)) if args.heads else {}
    workload = dataclasses.replace(WORKLOADS[args.workload], **changes)
    rows = Record("gpu_hops", args.out)
    for density in args.densities:
        for direction in DIRECTIONS:
            rows.add(measure(workload, direction, density, args.shards, args.rounds))
    columns = ["density", "direction", "uncut, ms", f"{args.shards} hops, ms", "ratio", "difference"]
    show(columns, map(line_of, rows))


if __name__ == "__main__":
    main()
