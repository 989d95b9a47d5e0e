"""A compute warpgroup of the fused Hopper backward: 64 keys against all queries that list them, a tile at a time.

Five products per tile of queries, S and dP transposed (keys by queries), so that P and dS come in registers as the left
operands of dV and dK. dQ needs the dS of all 128 keys: each warpgroup writes its half to shared memory, and multiplies
half of dQ.

    this tile     dP = V dO^T      while P = exp(S) is computed
                  dV += P dO       while dS = P * (dP - delta) is computed
                  dK += dS Q       while dS is written
    next tile     S = K Q^T
    this tile     dQ = dS^T K      while dK and S are still multiplied; dQ is added to global memory
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.fused import fixed_point
from xsake.kernels_pallas_gpu.hopper.fused.cta import FusedCta, HeadColumn
from xsake.kernels_pallas_gpu.hopper.fused.plan import DS_STAGES
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS
from xsake.kernels_pallas_gpu.hopper.tile.conditions import as_number, when
from xsake.kernels_pallas_gpu.hopper.tile.products import mma, opaque, read, with_zeros
from xsake.kernels_pallas_gpu.hopper.tile.vectors import ALONG_COLS, ALONG_ROWS, bias_tile, load_rows, over_columns


class FusedKeys:
    def __init__(self, cta: FusedCta) -> None:
        self.cta, self.plan, self.memory, self.barriers = cta, cta.plan, cta.memory, cta.barriers
        self.kv_start = cta.kv_start + cta.wg * ROWS
        self.keys = pl.ds(cta.wg * ROWS, ROWS)
        self.buffers = [x.at[cta.wg] for x in cta.memory.simulated]
        self.kv_vectors: dict[str, Any] = {}

    def run(self) -> None:
        cta, plan = self.cta, self.plan
        rows = pl.ds(self.kv_start, ROWS)
        self.kv_vectors = load_rows(cta.given.kv_vectors, cta.batch, rows)
        if plan.simulate:
            half = plan.head_dim // 2
            mine = cta.results.dq_per_cta.at[cta.number, :, :, pl.ds(cta.wg * half, half)]
            mine[...] = jnp.zeros(mine.shape, mine.dtype)
        plgpu.barrier_wait(self.barriers.kv_ready)
        shapes = [(ROWS, plan.head_dim), (ROWS, plan.v_head_dim)]
        dk, dv = with_zeros(self.accumulate, self.buffers[:2], shapes, interpret=plan.simulate)
        self.store(dk * plan.rule.scale, dv)

    def accumulate(self, dk: Any, dv: Any) -> tuple[Any, Any]:
        simulate = self.plan.simulate

        def first(s: Any) -> Any:
            self.start_s(s, jnp.int32(0))
            return read(s, in_flight=0, interpret=simulate)

        def step(n: Any, s: Any, column: HeadColumn, masked: Any) -> Any:
            return FusedTile(self, n, column, masked).run(s, dk, dv)

        s = with_zeros(first, self.buffers[2:3], [(ROWS, self.plan.tile)], interpret=simulate)
        # Where it can be, the code of full and masked tiles is the same: every copy takes time to compile.
        self.cta.walk(step, s, by_kind=not self.plan.rule.folds_lse)
        return read(dk, in_flight=0, interpret=simulate), read(dv, in_flight=0, interpret=simulate)

    def start_dq(self, dq: Any, n: Any) -> None:
        queries, columns = self.part_of_dq(opaque(self.cta.wg, interpret=self.plan.simulate))
        slot = lax.rem(n, DS_STAGES)
        plgpu.barrier_wait(self.barriers.ds_ready.at[slot])
        ds, keys = self.memory.ds.at[slot, :, queries], self.memory.k.at[:, columns]
        mma(dq, ds, keys, transpose_a=True, interpret=self.plan.simulate)

    def part_of_dq(self, wg: Any) -> tuple[Any, Any]:
        """(queries of the tile, columns) of dQ that a warpgroup multiplies."""
        rows, columns = self.plan.dq_shape
        if self.plan.halves_queries:
            return pl.ds(wg * rows, rows), slice(None)
        return slice(None), pl.ds(wg * columns, columns)

    def add_dq(self, dq: Any, q_start: Any, head: Any) -> None:
        """Adds this warpgroup's half of dQ to the sums in global memory, to which other CTAs add too."""
        cta, plan, tile = self.cta, self.plan, self.memory.dq.at[self.cta.wg]
        _, columns = self.part_of_dq(cta.wg)
        rows = pl.ds(q_start + (cta.wg * ROWS if plan.halves_queries else 0), ROWS)
        if plan.deterministic:
            channel_steps = plgpu.load(self.memory.channel_steps.at[columns], layout=ALONG_COLS)
            steps = lax.broadcast_in_dim(channel_steps, dq.shape, [1])
            dq = fixed_point.to_summands(dq, steps, interpret=plan.simulate)
        if plan.simulate:  # the interpreter's copy engine does not add
            sums = cta.results.dq_per_cta.at[cta.number, head - cta.head(0), rows, columns]
            sums[...] = sums[...] + dq
            return
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        tile[...] = dq
        if plan.deterministic:
            fixed_point.correct(tile, dq)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, cta.given.dq.at[cta.batch, rows, head, columns], reduction_op="add")

    def start_s(self, s: Any, n: Any) -> None:
        """Starts the logits of tile n. Past the last tile they are of old data in the ring, and are not used."""
        memory, rule, queries = self.memory, self.plan.rule, self.cta.q_ring.slot(n)
        when(n < self.cta.hi - self.cta.lo)(queries.wait)
        if rule.folds_lse:
            s[...] = over_columns(memory.statistic.at[queries.at])
        mma(s, memory.k.at[self.own_keys()], memory.q.at[queries.at], transpose_b=True, interpret=self.plan.simulate)

    def own_keys(self) -> Any:
        return pl.ds(opaque(self.cta.wg, interpret=self.plan.simulate) * ROWS, ROWS)

    def store(self, dk: Any, dv: Any) -> None:
        cta, plan, results = self.cta, self.plan, self.cta.results
        # Once the other warpgroup has read all keys too, dK overwrites K in shared memory, and dV overwrites V.
        plgpu.barrier_arrive(self.barriers.all_read)
        plgpu.barrier_wait(self.barriers.all_read)

        def whole() -> None:
            rows = pl.ds(self.kv_start, ROWS)
            for value, tile, out in ((dk, self.memory.k, results.dk), (dv, self.memory.v, results.dv)):
                tile.at[self.keys][...] = value.astype(plan.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(tile.at[self.keys], out.at[cta.batch, rows, cta.kv_head])

        def part() -> None:
            results.dk_parts.at[cta.pair, cta.rank, cta.part, self.keys][...] = dk
            results.dv_parts.at[cta.pair, cta.rank, cta.part, self.keys][...] = dv

        if plan.parts == 1:
            whole()
        else:
            when(cta.is_early)(part)
            when(jnp.logical_not(cta.is_early))(whole)
        plgpu.wait_smem_to_gmem(0)


class FusedTile:
    """A tile of queries of one head against the warpgroup's keys."""

    def __init__(self, warpgroup: FusedKeys, n: Any, column: HeadColumn, masked: Any) -> None:
        self.warpgroup, self.cta, self.plan = warpgroup, warpgroup.cta, warpgroup.plan
        self.memory, self.barriers = warpgroup.memory, warpgroup.barriers
        self.n, self.column, self.masked = n, column, masked
        self.head, self.q_start = column.head, column.start_of(n)
        self.queries, self.d_outs = self.cta.q_ring.slot(n), self.cta.do_ring.slot(n)
        self.q, self.d_out = self.memory.q.at[self.queries.at], self.memory.do.at[self.d_outs.at]
        self.simulate = self.plan.simulate

    def run(self, s: Any, dk: Any, dv: Any) -> Any:
        """Returns the logits of the next tile."""
        plan, buffers = self.plan, self.warpgroup.buffers

        def weigh(dp: Any) -> Any:
            dp[...] = over_columns(self.memory.delta.at[self.d_outs.at])
            values = self.memory.v.at[self.warpgroup.own_keys()]
            mma(dp, values, self.d_out, transpose_b=True, interpret=self.simulate)
            p, weight = self.probabilities(s)
            mma(dv, p.astype(plan.dtype), self.d_out, interpret=self.simulate)
            ds = weight * read(dp, in_flight=1, interpret=self.simulate)
            rounded = ds.astype(plan.dtype)
            if not plan.deterministic:
                return rounded, rounded
            steps = over_columns(self.memory.row_steps.at[self.queries.at])
            scaled = rounded * steps if plan.dtype == jnp.bfloat16 else (ds * steps).astype(plan.dtype)
            return rounded, scaled

        self.d_outs.wait()
        ds, scaled = with_zeros(weigh, buffers[3:4], [(ROWS, self.plan.tile)], interpret=self.simulate)
        warpgroup, slot = self.warpgroup, lax.rem(self.n, DS_STAGES)
        mma(dk, ds, self.q, interpret=self.simulate)
        # The slot is free: the other warpgroup read the dS of two tiles ago before it wrote the dS of the last tile.
        self.memory.ds.at[slot, warpgroup.keys][...] = scaled
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers.ds_ready.at[slot])
        if not self.simulate:
            plgpu.wgmma_wait(1)  # until dV is done: the registers of P are needed

        def ahead(s: Any, dq: Any) -> Any:
            warpgroup.start_s(s, self.n + 1)
            warpgroup.start_dq(dq, self.n)
            s = read(s, in_flight=1, interpret=self.simulate)
            self.queries.release()
            self.d_outs.release()
            warpgroup.add_dq(read(dq, in_flight=0, interpret=self.simulate), self.q_start, self.head)
            return s

        shapes = [(ROWS, plan.tile), plan.dq_shape]
        return with_zeros(ahead, [*buffers[2:3], *buffers[4:]], shapes, interpret=self.simulate)

    def probabilities(self, s: Any) -> tuple[Any, Any]:
        plan, rule, statistic = self.plan, self.plan.rule, self.memory.statistic.at[self.queries.at]
        bias = None
        if plan.has_bias:
            bias = bias_tile(
                self.cta.given.bias,
                self.cta.batch,
                self.head,
                self.warpgroup.kv_start,
                self.q_start,
                (ROWS, self.plan.tile),
            )
        if rule.folds_lse:
            return rule.probabilities(lax.fori_loop(0, as_number(self.masked), self.exclude, s), None, None, None)
        return rule.probabilities(s, over_columns(statistic), bias, self.element_mask() if self.masked else None)

    def exclude(self, _: Any, s: Any) -> Any:
        mask = self.element_mask()
        return s if mask is None else jnp.where(mask, s, -jnp.inf)

    def element_mask(self) -> Any:
        queries = {
            name: plgpu.load(x.at[self.queries.at], layout=ALONG_COLS) for name, x in self.memory.q_vectors.items()
        }
        keys = self.warpgroup.kv_vectors
        kv_index = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ALONG_ROWS) + self.warpgroup.kv_start
        ok = self.plan.elements.attends(
            (ROWS, self.plan.tile),
            queries.get("position", queries.get("index")),
            keys.get("position", kv_index),
            q_segment=queries.get("segment"),
            kv_segment=keys.get("segment"),
            kv_index=kv_index,
        )
        if self.cta.given.bits is None:
            return ok
        bits = self.column.bits(self.n, self.warpgroup.kv_start, (ROWS, self.plan.tile))
        return bits if ok is None else ok & bits
