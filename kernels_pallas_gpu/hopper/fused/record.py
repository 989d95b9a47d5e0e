"""The fused backward as the backend knows it: the calls that it serves, and its configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax import Array

from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu.hopper.fused import launch, plan
from xsake.kernels_pallas_gpu.hopper.fused.plan import FusedConfig
from xsake.kernels_pallas_gpu.hopper.kernel import Kernel, interpretation, short_blocks
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing


def knows(call: Call) -> str | None:
    if Packing.of_call(call).group == 1 and not short_blocks(call):
        return None
    return "it knows no blocks under 64 queries or keys; use=False runs other kernels for dQ and for dK and dV"


def default(call: Call) -> FusedConfig:
    if knows(call):
        return FusedConfig(use=False)
    chosen = plan.heuristic(call)
    # With bitmaps it spills a few registers: tuning has to show that it is faster.
    return chosen if call.mask.bitmaps is None else dataclasses.replace(chosen, use=False)


def space(call: Call) -> Sequence[FusedConfig]:
    return plan.search_space(call, default(call))


def misfit(call: Call, config: FusedConfig) -> str | None:
    return (knows(call) or plan.misfit(call, config)) if config.use else None


def run(call: Call, lse: Array, delta: Array, d_out: Array, *, config: FusedConfig) -> tuple[Array, Array, Array]:
    """(dQ, dK, dV)"""
    return launch.backward(call, lse, delta, d_out, config=config, interpret=interpretation())


KERNEL = Kernel(name="fused", knows=knows, default=default, space=space, misfit=misfit, run=run)
