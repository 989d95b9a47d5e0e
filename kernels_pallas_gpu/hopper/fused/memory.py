"""The memory warpgroup of the fused Hopper backward: loads the keys and values once, and streams Q and dO."""

from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.fused.cta import Cta, HeadColumn
from xsake.kernels_pallas_gpu.hopper.fused.plan import KEYS
from xsake.kernels_pallas_gpu.hopper.tile.backward import drain
from xsake.kernels_pallas_gpu.hopper.tile.conditions import when


def load(cta: Cta) -> None:
    plan, given, scratch, barriers = cta.plan, cta.given, cta.scratch, cta.barriers
    keys = pl.ds(cta.kv_start, KEYS)
    plgpu.copy_gmem_to_smem(given.k.at[cta.batch, keys, cta.kv_head], scratch.k, barriers.kv_ready)
    plgpu.copy_gmem_to_smem(given.v.at[cta.batch, keys, cta.kv_head], scratch.v, barriers.kv_ready)
    if plan.deterministic:
        steps = given.steps.channels.at[cta.batch, cta.kv_head]
        plgpu.copy_gmem_to_smem(steps, scratch.channel_steps, barriers.kv_ready)

    def step(n: Any, _: Any, column: HeadColumn, masked: Any) -> None:
        head, queries = column.head, pl.ds(column.start_of(n), plan.tile)
        slot, ready = _next(n, barriers.q_free, barriers.q_ready, plan.config.q_stages)
        plgpu.copy_gmem_to_smem(given.q.at[cta.batch, queries, head], scratch.q.at[slot], ready)
        plgpu.copy_gmem_to_smem(given.statistic.at[cta.batch, head, queries], scratch.statistic.at[slot], ready)
        if plan.deterministic:
            plgpu.copy_gmem_to_smem(given.steps.rows.at[cta.batch, head, queries], scratch.row_steps.at[slot], ready)
        for name, x in given.q_vectors.items():
            per_token = x.at[0 if x.shape[0] == 1 else cta.batch, queries]
            plgpu.copy_gmem_to_smem(per_token, scratch.q_vectors[name].at[slot], ready)
        slot, ready = _next(n, barriers.do_free, barriers.do_ready, plan.config.do_stages)
        plgpu.copy_gmem_to_smem(given.d_out.at[cta.batch, queries, head], scratch.do.at[slot], ready)
        plgpu.copy_gmem_to_smem(given.minus_delta.at[cta.batch, head, queries], scratch.delta.at[slot], ready)

    cta.walk(step, None, by_kind=False)
    if plan.simulate:
        drain(barriers.q_free, plan.config.q_stages, cta.hi - cta.lo)
        drain(barriers.do_free, plan.config.do_stages, cta.hi - cta.lo)


def _next(n: Any, free: Any, ready: Any, stages: int) -> tuple[Any, Any]:
    """Waits until the slot of tile n is free; returns (slot, barrier of the copies that fill the slot)."""
    slot = lax.rem(n, stages)
    when(n >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
    return slot, ready.at[slot]
