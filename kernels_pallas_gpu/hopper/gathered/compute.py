"""A compute warpgroup of the gathered Hopper dK/dV kernel: the CTA's keys against every second tile of queries."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.gathered.cta import GatheredCta
from xsake.kernels_pallas_gpu.hopper.gathered.plan import WGS
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS
from xsake.kernels_pallas_gpu.hopper.tile.conditions import when
from xsake.kernels_pallas_gpu.hopper.tile.products import mma, read, release, with_values, with_zeros
from xsake.kernels_pallas_gpu.hopper.tile.vectors import WGMMA, over_columns


class GatheredKeys:
    """The CTA's 64 keys and their values, in one of its compute warpgroups."""

    def __init__(self, cta: GatheredCta) -> None:
        self.cta, self.plan, self.memory, self.simulate = cta, cta.plan, cta.memory, cta.plan.simulate
        self.buffers = [x.at[cta.wg] for x in cta.memory.simulated]

    def run(self) -> None:
        plan, barriers = self.plan, self.cta.barriers
        when(self.cta.wg == 0)(self.load)
        plgpu.barrier_wait(barriers.resident)
        shapes = [(ROWS, plan.head_dim), (ROWS, plan.v_head_dim)]
        dk, dv = with_zeros(self.accumulate, self.buffers[:2], shapes, interpret=self.simulate)
        # The second warpgroup hands its sums over in the ring, which is free when both have finished.
        plgpu.barrier_arrive(barriers.finished)
        plgpu.barrier_wait(barriers.finished)
        when(self.cta.wg == 1)(lambda: self.hand_over(dk, dv))
        when(self.cta.wg == 0)(lambda: self.store(dk, dv))

    def load(self) -> None:
        given, column, rows = self.cta.given, self.cta.column, pl.ds(self.cta.column.kv_start, ROWS)
        for source, tile in ((given.k, self.memory.k), (given.v, self.memory.v)):
            plgpu.copy_gmem_to_smem(source.at[column.batch, rows, column.head], tile, self.cta.barriers.resident)

    def accumulate(self, dk: Any, dv: Any) -> tuple[Any, Any]:
        cta = self.cta

        def one_tile(n: Any, _: Any) -> None:
            slot = cta.ring.wait(WGS * n + cta.wg)
            self.tile(dk, dv, slot)
            release(cta.ring.free.at[slot], interpret=self.simulate)

        lax.fori_loop(0, lax.div(cta.tiles + (WGS - 1) - cta.wg, jnp.int32(WGS)), one_tile, None)
        return read(dk, in_flight=0, interpret=self.simulate), read(dv, in_flight=0, interpret=self.simulate)

    def tile(self, dk: Any, dv: Any, slot: Any) -> None:
        memory, right = self.memory, self.plan.elements.band.right

        def run(masked: bool) -> None:
            with_values(
                functools.partial(self.products, dk, dv, slot, masked),
                self.buffers[2:],
                [over_columns(memory.statistic.at[slot]), over_columns(memory.delta.at[slot])],
                interpret=self.simulate,
            )

        if right is None:
            run(False)
            return
        near = memory.numbers[slot, self.plan.pieces] + jnp.int32(right) < self.cta.column.kv_start + (ROWS - 1)
        when(near)(lambda: run(True))
        when(jnp.logical_not(near))(lambda: run(False))

    def products(self, dk: Any, dv: Any, slot: Any, masked: bool, s_acc: Any, dp_acc: Any) -> None:
        plan, memory, simulate = self.plan, self.memory, self.simulate
        q_tile, do_tile = memory.q.at[slot], memory.do.at[slot]
        # S and dP, transposed: keys by queries
        mma(s_acc, memory.k, q_tile, transpose_b=True, interpret=simulate)
        mma(dp_acc, memory.v, do_tile, transpose_b=True, interpret=simulate)
        s = read(s_acc, in_flight=1, interpret=simulate)
        # P, while dP is computed
        p, _ = plan.rule.probabilities(s, None, None, self.element_mask(slot) if masked else None)
        # dV, while dS is computed
        mma(dv, p.astype(plan.dtype), do_tile, interpret=simulate)
        ds = p * read(dp_acc, in_flight=1, interpret=simulate)
        # dK
        mma(dk, ds.astype(plan.dtype), q_tile, interpret=simulate)

    def element_mask(self, slot: Any) -> Any:
        """bool[keys, rows]"""
        plan, numbers, shape = self.plan, self.memory.numbers, (ROWS, ROWS)
        piece = plan.packing.query(plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA))
        query = lax.broadcast_in_dim(numbers[slot, 0], shape, [])
        for i in range(1, plan.pieces):
            query = jnp.where(piece < i, query, lax.broadcast_in_dim(numbers[slot, i], shape, []))
        key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA) + self.cta.column.kv_start
        return query + jnp.int32(plan.elements.band.right) >= key

    def hand_over(self, dk: Any, dv: Any) -> None:
        """Write each float32 sum as two 16-bit numbers: the rounded sum, and the remainder."""
        for x, tiles in ((dk, self.memory.q), (dv, self.memory.do)):
            high = x.astype(self.plan.dtype)
            tiles.at[0][...] = high
            tiles.at[1][...] = (x - high.astype(jnp.float32)).astype(self.plan.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.cta.barriers.handed_over)

    def store(self, dk: Any, dv: Any) -> None:
        plan, memory, results = self.plan, self.memory, self.cta.results
        plgpu.barrier_wait(self.cta.barriers.handed_over)

        def both(x: Any, tiles: Any) -> Any:
            for half in range(2):
                x = x + plgpu.load(tiles.at[half], layout=WGMMA).astype(jnp.float32)
            return x

        column = self.cta.read_column()
        found = both(dk, memory.q) * plan.rule.scale, both(dv, memory.do)

        @when(column.is_early)
        def _part() -> None:
            for x, parts in zip(found, (results.dk_parts, results.dv_parts), strict=True):
                parts.at[column.part][...] = x

        @when(jnp.logical_not(column.is_early))
        def _whole() -> None:
            rows = pl.ds(column.kv_start, ROWS)
            for x, tile, out in zip(found, (memory.k, memory.v), (results.dk, results.dv), strict=True):
                tile[...] = x.astype(plan.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(tile, out.at[column.batch, rows, column.head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
