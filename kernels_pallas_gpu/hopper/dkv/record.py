"""The dK/dV kernel as the backend knows it: the calls that it serves, and its configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from jax import Array

from xsake._rewrites import rewrite
from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu.hopper.dkv import launch
from xsake.kernels_pallas_gpu.hopper.dkv.copied_heads import CopiedHeads
from xsake.kernels_pallas_gpu.hopper.dkv.plan import DkvPlan
from xsake.kernels_pallas_gpu.hopper.kernel import Kernel, interpretation
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import BackwardConfig, BackwardTiles
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing


def knows(call: Call) -> str | None:
    return None


def _tiles(call: Call) -> BackwardTiles:
    packing = Packing.of_call(call)
    return BackwardTiles(plan=lambda config: DkvPlan.of(call, packing, config))


def first_fit(call: Call, tiles: BackwardTiles) -> BackwardConfig:
    wide = 128 if Packing.of_call(call).rows % 128 == 0 and max(call.head_dim, call.value_dim) <= 64 else 64
    return tiles.first_fit(
        dict(tile=wide, stages=4, inner_stages=4, resident_stages=2),
        dict(tile=wide, stages=3, inner_stages=2, resident_stages=2),
        dict(tile=wide, stages=4, inner_stages=4),
        dict(tile=wide, stages=3, inner_stages=3),
        dict(tile=64, stages=2, inner_stages=2),
        dict(tile=64, stages=1, inner_stages=1),
    )


def default(call: Call) -> BackwardConfig:
    return _with_registers_for_copies(call, first_fit(call, _tiles(call)))


def space(call: Call) -> Sequence[BackwardConfig]:
    found = _tiles(call).space(first_fit(call, _tiles(call)), accumulators=call.head_dim + call.value_dim)
    return [_with_registers_for_copies(call, config) for config in found]


def misfit(call: Call, config: BackwardConfig) -> str | None:
    return _tiles(call).misfit(config)


def _with_registers_for_copies(call: Call, config: BackwardConfig) -> BackwardConfig:
    """The memory warpgroup loads a packed tile by many copies, for which 24 registers are too few."""
    if Packing.of_call(call).group == 1:
        return config
    return dataclasses.replace(config, compute_registers=232, memory_registers=40)


def run(call: Call, lse: Array, minus_delta: Array, d_out: Array, *, config: BackwardConfig) -> tuple[Array, Array]:
    """(dK, dV)"""

    def run_kernel(of_rewritten: Call, *given: Array) -> tuple[None, Array, Array]:
        options = dict(float32_results=of_rewritten is not call, interpret=interpretation())
        return None, *launch.dkv(of_rewritten, *given, config=config, **options)

    copies = partial(CopiedHeads.of, compute_wgs=config.compute_wgs)
    _, d_key, d_value = rewrite.backward((copies,), call, (lse, minus_delta, d_out), run_kernel)
    return d_key, d_value


KERNEL = Kernel(name="dkv", knows=knows, default=default, space=space, misfit=misfit, run=run)
