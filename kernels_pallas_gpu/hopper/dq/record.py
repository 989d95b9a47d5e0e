"""The dQ kernel as the backend knows it: the calls that it serves, and its configurations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax import Array

from xsake.backend.contract import Call
from xsake.backend.delta import DeltaParts
from xsake.kernels_pallas_gpu.hopper.dq import launch
from xsake.kernels_pallas_gpu.hopper.dq.plan import DqPlan
from xsake.kernels_pallas_gpu.hopper.kernel import Kernel, interpretation, short_blocks
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import BackwardConfig, BackwardTiles
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing


def knows(call: Call) -> str | None:
    return None


def _tiles(call: Call) -> BackwardTiles:
    packing = Packing.of_call(call)
    return BackwardTiles(plan=lambda config: DqPlan.of(call, packing, config, sums_delta=False, interpret=False))


def default(call: Call) -> BackwardConfig:
    return _with_registers_for_runs(call, _first_fit(call))


def _first_fit(call: Call) -> BackwardConfig:
    whole = call.mask.block_kv % 128 == 0 or short_blocks(call)
    wide = 128 if whole and max(call.head_dim, call.value_dim) <= 128 else 64
    return _tiles(call).first_fit(
        dict(tile=wide, stages=2, inner_stages=2, resident_stages=2),
        dict(tile=wide, stages=2, inner_stages=1, resident_stages=2),
        dict(tile=wide, stages=2, inner_stages=2),
        dict(tile=64, stages=3, inner_stages=3),
        dict(tile=64, stages=2, inner_stages=2),
        dict(tile=64, stages=2, inner_stages=1),
        dict(tile=64, stages=2, inner_stages=2, compute_wgs=1),
        dict(tile=64, stages=1, inner_stages=1, compute_wgs=1),
    )


def space(call: Call) -> Sequence[BackwardConfig]:
    found = _tiles(call).space(_first_fit(call), accumulators=call.head_dim)
    return [_with_registers_for_runs(call, config) for config in found]


def misfit(call: Call, config: BackwardConfig) -> str | None:
    return _tiles(call).misfit(config)


def _with_registers_for_runs(call: Call, config: BackwardConfig) -> BackwardConfig:
    """The memory warpgroup holds the first keys of a tile's runs. For those of eight, 24 registers are too few."""
    if not short_blocks(call) or config.tile // math.gcd(config.tile, call.mask.block_kv) < 8:
        return config
    return dataclasses.replace(config, compute_registers=232, memory_registers=40)


def sums_delta(call: Call, parts: DeltaParts) -> bool:
    """Whether the kernel sums delta: it reads the rows of `out` whole, and as they lie in memory."""
    whole = call.q_len % call.mask.block_q == 0 and parts.out.shape[-1] == call.value_dim
    same = parts.out.dtype == call.query.dtype
    return whole and same and Packing.of_call(call).group == 1 and call.q_segments is None


def run(
    call: Call, lse: Array, minus_delta: Array | DeltaParts, d_out: Array, *, config: BackwardConfig
) -> tuple[Array, Array]:
    """(dQ, -delta)"""
    return launch.dq(call, lse, minus_delta, d_out, config=config, interpret=interpretation())


KERNEL = Kernel(name="dq", knows=knows, default=default, space=space, misfit=misfit, run=run)
