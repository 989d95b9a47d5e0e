"""Gradients of blocks of 16 and 32 keys on a Hopper GPU, kernel by kernel, beside blocks of 128 x 128 and Triton's.

    python -m benchmarks.gpu.short_gradients             measure and print
    python -m benchmarks.gpu.short_gradients --record    also write benchmarks/results/gpu_short_gradients.json

32768 tokens, 32 heads on 8 of 128, a tenth of the blocks. The time of dK and dV has that of merging the mask's lists.
Gradients must agree with those of the Triton kernels, where these are raced. `gpu/blocks.py` times forward and backward
as a whole.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.gpu.blocks import DENSITY, MASKS
from benchmarks.harness.contestants import WORST, relative_difference
from benchmarks.harness.race import timings
from benchmarks.harness.script import Record, Row, need_gpu, parser, spread
from xsake._op.arguments import build_call
from xsake._race.course import BOTH, Course, compile_all
from xsake.autotune.workloads import WORKLOADS
from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu.hopper import backend as hopper
from xsake.kernels_pallas_gpu.hopper.dkv import record as dkv
from xsake.kernels_pallas_gpu.hopper.dq import record as dq
from xsake.kernels_pallas_gpu.triton import backend as triton

BLOCKS = ((128, 128), (64, 64), (128, 32), (64, 32), (128, 16), (64, 16))  # queries x keys
BY_TRITON = ((128, 32), (64, 16))
Given = tuple[Call, Array, Array, Array]  # the call, lse, -delta and the output's cotangent


def forward(call: Call, *_: Array) -> Any:
    return hopper.forward(call, hopper.default_config(call))


def d_query(*given: Array | Call) -> Any:
    return dq.KERNEL.run(*given, config=hopper.default_config(given[0]).dq)


def d_key_value(*given: Array | Call) -> Any:
    return dkv.KERNEL.run(*given, config=hopper.default_config(given[0]).dkv)


def by_triton(call: Call, lse: Array, minus_delta: Array, d_out: Array) -> Any:
    return triton.backward(call, triton.default_config(call), lse, -minus_delta, d_out, with_bias=False)[:3]


def given_of(course: Course, mask: Any) -> Given:
    call = build_call(*course.inputs, mask, default_blocks=(128, 128))
    out, lse = jax.jit(forward)(call)
    delta = jnp.einsum("bthd,bthd->bht", *(x.astype(jnp.float32) for x in (out, course.cotangent)))
    return call, lse, -delta, course.cotangent


def measure(kind: str, rounds: int) -> list[Row]:
    """A row per size of blocks; all kernels of all sizes run in one race."""
    workload = WORKLOADS["llama32k"]
    course = Course(workload, BOTH)
    rows, contestants = [], {}
    for block_q, block_kv in BLOCKS:
        mask = MASKS[kind](dataclasses.replace(workload, block=block_q, block_kv=block_kv), DENSITY)
        kernels: dict[str, Callable] = {"forward": forward, "dq": d_query, "dkv": d_key_value}
        if (block_q, block_kv) in BY_TRITON:
            kernels["triton"] = by_triton
        given = given_of(course, mask)
        runs = {name: partial(jax.jit(kernel), *given) for name, kernel in kernels.items()}
        found = dict(zip(runs, compile_all(runs.values()), strict=True))
        if "triton" in found:
            ours = found["dq"][0], *found["dkv"]
            worst = max(relative_difference(*pair) for pair in zip(ours, found["triton"], strict=True))
            assert worst <= WORST, f"gradients of {block_q} x {block_kv} differ from Triton's by {worst:.1e}"
        contestants |= {(block_q, block_kv, name): run for name, run in runs.items()}
        rows.append(dict(mask=kind, block_q=block_q, block_kv=block_kv, density=float(mask.density())))
    times = timings({" ".join(map(str, key)): run for key, run in contestants.items()}, rounds)
    for row, name in itertools.product(rows, ("forward", "dq", "dkv", "triton")):
        if (found := times.get(f"{row['block_q']} {row['block_kv']} {name}")) is not None:
            row.setdefault("seconds", {})[name] = found
    return rows


def main() -> None:
    args = parser(__doc__, rounds=5).parse_args()
    need_gpu("benchmarks.gpu.short_gradients")
    record = Record("gpu_short_gradients", args.out)
    for kind in MASKS:
        record.add(*measure(kind, args.rounds))
    for row in record:
        seconds = {name: spread(found) for name, found in row["seconds"].items()}
        print(row["mask"], f"{row['block_q']} x {row['block_kv']}", seconds, flush=True)


if __name__ == "__main__":
    main()
