"""Two compute warpgroups of the Hopper dK/dV kernel that share 64 keys, whose accumulators one could not hold.

The first computes P and dV, the second dP and dK; P goes from the first to the second through shared memory.
"""

from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.dkv.cta import DkvCta, Streaming
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS
from xsake.kernels_pallas_gpu.hopper.tile.conditions import when
from xsake.kernels_pallas_gpu.hopper.tile.products import mma, read, release, wgmma_full, with_values, with_zeros
from xsake.kernels_pallas_gpu.hopper.tile.vectors import WGMMA, bias_tile, load_rows, over_columns
from xsake.kernels_pallas_gpu.hopper.work.turns import Item


class Values:
    """An item of the first warpgroup."""

    def __init__(self, cta: DkvCta, item: Item) -> None:
        self.cta, self.plan, self.item, self.simulate = cta, cta.plan, item, cta.plan.simulate
        self.batch, self.kv_head, self.kv_start, _ = cta.keys(item)
        self.buffers = [x.at[0] for x in cta.memory.simulated]
        self.kv_rows: dict[str, Any] = {}

    def run(self, done: Any) -> Any:
        cta, hand_over = self.cta, self.cta.hand_over
        rows, resident = pl.ds(self.kv_start, ROWS), cta.barriers.resident.at[0]
        plgpu.copy_gmem_to_smem(cta.given.k.at[self.batch, rows, self.kv_head], cta.memory.k.at[0], resident)
        self.kv_rows = load_rows(cta.given.kv_vectors, self.batch, rows)
        plgpu.barrier_wait(resident)

        def accumulate(dv: Any) -> Any:
            total = cta.walk(self.item, done, lambda streaming: self.step(streaming, dv, done))
            when(total > done)(lambda: plgpu.barrier_wait(hand_over.p_free))
            return read(dv, in_flight=0, interpret=self.simulate), total

        shapes = [(ROWS, self.plan.v_head_dim)]
        dv, total = with_zeros(accumulate, self.buffers[1:2], shapes, interpret=self.simulate)
        _store_when_both_finished(cta, dv, cta.memory.v.at[0], cta.results.dv.at[self.batch, rows, self.kv_head])
        return total

    def step(self, streaming: Streaming, dv: Any, done: Any) -> None:
        cta, plan, hand_over = self.cta, self.plan, self.cta.hand_over
        rule, tile, (queries, d_outs) = plan.rule, plan.tile, cta.slots(streaming.n, cta.ring)
        q_tile, do_tile = cta.memory.q.at[queries.at], cta.memory.do.at[d_outs.at]
        start = streaming.start if plan.has_bias else 0
        queries.wait()

        def statistic() -> Any:
            return over_columns(cta.memory.statistic.at[queries.at])

        def bias() -> Any:
            at = self.batch, streaming.head, self.kv_start, start
            return bias_tile(cta.given.bias, *at, (ROWS, tile))

        def mask() -> Any:
            return cta.element_mask(queries, pl.ds(0, tile), self.kv_start, self.kv_rows, streaming.bits, 0)

        def products(s_acc: Any) -> None:
            mma(s_acc, cta.memory.k.at[0], q_tile, transpose_b=True, interpret=self.simulate)
            p, weight = rule.probabilities(
                read(s_acc, in_flight=0, interpret=self.simulate),
                None if rule.folds_lse else statistic(),
                bias() if plan.has_bias else None,
                mask() if streaming.masked else None,
            )
            queries.release()
            when(streaming.n > done)(lambda: plgpu.barrier_wait(hand_over.p_free))
            hand_over.p[...] = weight
            plgpu.commit_smem()
            plgpu.barrier_arrive(hand_over.p_ready)
            d_outs.wait()
            mma(dv, p.astype(plan.dtype), do_tile, interpret=self.simulate)

        s = statistic() if rule.folds_lse else wgmma_full((ROWS, tile), 0.0)
        with_values(products, self.buffers[2:3], [s], interpret=self.simulate)
        d_outs.release()


class Keys:
    """An item of the second warpgroup."""

    def __init__(self, cta: DkvCta, item: Item) -> None:
        self.cta, self.plan, self.item, self.simulate = cta, cta.plan, item, cta.plan.simulate
        self.batch, self.kv_head, self.kv_start, _ = cta.keys(item)
        self.buffers = [x.at[1] for x in cta.memory.simulated]

    def run(self, done: Any) -> Any:
        cta, rows, resident = self.cta, pl.ds(self.kv_start, ROWS), self.cta.barriers.resident.at[1]
        plgpu.copy_gmem_to_smem(cta.given.v.at[self.batch, rows, self.kv_head], cta.memory.v.at[0], resident)
        plgpu.barrier_wait(resident)

        def accumulate(dk: Any) -> Any:
            total = cta.walk(self.item, done, lambda streaming: self.step(streaming, dk))
            return read(dk, in_flight=0, interpret=self.simulate), total

        shapes = [(ROWS, self.plan.head_dim)]
        dk, total = with_zeros(accumulate, self.buffers[:1], shapes, interpret=self.simulate)
        out = cta.results.dk.at[self.batch, rows, self.kv_head]
        _store_when_both_finished(cta, dk * self.plan.rule.scale, cta.memory.k.at[0], out)
        return total

    def step(self, streaming: Streaming, dk: Any) -> None:
        cta, plan, hand_over = self.cta, self.plan, self.cta.hand_over
        queries, d_outs = cta.slots(streaming.n, cta.ring)
        q_tile, do_tile = cta.memory.q.at[queries.at], cta.memory.do.at[d_outs.at]
        d_outs.wait()

        def products(dp_acc: Any) -> None:
            mma(dp_acc, cta.memory.v.at[0], do_tile, transpose_b=True, interpret=self.simulate)
            plgpu.barrier_wait(hand_over.p_ready)
            p = plgpu.load(hand_over.p, layout=WGMMA)
            release(hand_over.p_free, interpret=self.simulate)
            ds = p * read(dp_acc, in_flight=0, interpret=self.simulate)
            d_outs.release()
            queries.wait()
            mma(dk, ds.astype(plan.dtype), q_tile, interpret=self.simulate)

        dp = over_columns(cta.memory.delta.at[d_outs.at])
        with_values(products, self.buffers[3:4], [dp], interpret=self.simulate)
        queries.release()


def _store_when_both_finished(cta: DkvCta, x: Any, tile: Any, out: Any) -> None:
    """Writes x, in the keys' type by way of a tile that the other warpgroup may still read."""
    finished = cta.hand_over.finished
    plgpu.barrier_arrive(finished)
    plgpu.barrier_wait(finished)
    if cta.plan.float32_results:
        out[...] = x
    else:
        tile[...] = x.astype(cta.plan.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    # The other loads its next keys or values to where this one's results were.
    plgpu.barrier_arrive(finished)
    plgpu.barrier_wait(finished)
