"""The memory warpgroup of the fused Hopper backward: loads the keys and values once, and streams Q and dO."""

from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.fused.cta import FusedCta, HeadColumn
from xsake.kernels_pallas_gpu.hopper.fused.plan import KEYS


def load(cta: FusedCta) -> None:
    plan, given, memory, barriers = cta.plan, cta.given, cta.memory, cta.barriers
    keys = pl.ds(cta.kv_start, KEYS)
    plgpu.copy_gmem_to_smem(given.k.at[cta.batch, keys, cta.kv_head], memory.k, barriers.kv_ready)
    plgpu.copy_gmem_to_smem(given.v.at[cta.batch, keys, cta.kv_head], memory.v, barriers.kv_ready)
    if plan.deterministic:
        steps = given.steps.channels.at[cta.batch, cta.kv_head]
        plgpu.copy_gmem_to_smem(steps, memory.channel_steps, barriers.kv_ready)

    def step(n: Any, _: Any, column: HeadColumn, masked: Any) -> None:
        start = column.start_of(n)
        for ring in (cta.q_ring, cta.do_ring):
            ring.load(n, ring.slot(n), cta.batch, column.head, [start])

    cta.walk(step, None, by_kind=False)
    if plan.simulate:
        cta.q_ring.drain(cta.hi - cta.lo)
        cta.do_ring.drain(cta.hi - cta.lo)
