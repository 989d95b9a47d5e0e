"""The gathering dK/dV kernel as the backend knows it: the calls that it serves, and its configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax import Array

from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu.hopper.dkv import record as dkv
from xsake.kernels_pallas_gpu.hopper.gathered import launch, plan
from xsake.kernels_pallas_gpu.hopper.kernel import Kernel, interpretation
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS, BackwardConfig, BackwardTiles


def knows(call: Call) -> str | None:
    return plan.unknown(call, call.head_dim, call.value_dim)


def wanted(call: Call, config: BackwardConfig) -> bool:
    """Whether the kernel serves in place of the one that streams all queries of a block."""
    if config.gather is None:
        return knows(call) is None and config.compute_wgs == plan.WGS
    return config.gather


def _tiles(call: Call) -> BackwardTiles:
    return BackwardTiles(plan=lambda config: plan.GatheredPlan.of(call, config))


def default(call: Call) -> BackwardConfig:
    return dataclasses.replace(dkv.first_fit(call, _tiles(call)), tile=ROWS)


def space(call: Call) -> Sequence[BackwardConfig]:
    return _tiles(call).space(default(call), accumulators=call.head_dim + call.value_dim)


def misfit(call: Call, config: BackwardConfig) -> str | None:
    if problem := knows(call):
        return f"gather=True: {problem}"
    if config.compute_wgs != plan.WGS:
        return f"gather=True needs compute_wgs={plan.WGS}"
    return _tiles(call).misfit(config)


def run(call: Call, lse: Array, minus_delta: Array, d_out: Array, *, config: BackwardConfig) -> tuple[Array, Array]:
    """(dK, dV)"""
    return launch.dkv(call, lse, minus_delta, d_out, config=config, interpret=interpretation())


KERNEL = Kernel(name="dkv", knows=knows, default=default, space=space, misfit=misfit, run=run)
