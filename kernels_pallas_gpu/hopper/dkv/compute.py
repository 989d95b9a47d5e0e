"""A compute warpgroup of the Hopper dK/dV kernel: 64 keys against all queries that list them, a tile at a time.

Four products per tile of queries, S and dP transposed (keys by queries), so that P and dS come in registers as the left
operands of dV and dK.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.dkv.cta import DkvCta, Streaming
from xsake.kernels_pallas_gpu.hopper.dkv.plan import PAIR, PIECE
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS
from xsake.kernels_pallas_gpu.hopper.tile.conditions import as_number, run_where, when
from xsake.kernels_pallas_gpu.hopper.tile.logits import PART
from xsake.kernels_pallas_gpu.hopper.tile.products import mma, opaque, read, wgmma_full, with_values, with_zeros
from xsake.kernels_pallas_gpu.hopper.tile.vectors import bias_tile, load_rows, over_columns
from xsake.kernels_pallas_gpu.hopper.work.turns import Item


class Column:
    """An item: 64 keys and their values."""

    def __init__(self, cta: DkvCta, item: Item) -> None:
        self.cta, self.plan, self.item, self.memory = cta, cta.plan, item, cta.memory
        self.batch, self.kv_head, self.kv_start, _ = cta.keys(item)
        self.place = item.place * cta.plan.compute_wgs + cta.wg
        self.buffers = [x.at[cta.wg] for x in cta.memory.simulated]
        self.kv_rows: dict[str, Any] = {}

    def run(self, done: Any) -> Any:
        """`done`, here and elsewhere: tiles of the items before; returns that with this item's."""
        cta, plan = self.cta, self.plan
        rows = pl.ds(self.kv_start, ROWS)
        if not plan.ahead:
            cta.load_residents(self.batch, self.kv_start, self.kv_head, self.place)
        self.kv_rows = load_rows(cta.given.kv_vectors, self.batch, rows)
        plgpu.barrier_wait(cta.barriers.resident.at[self.place])
        if plan.ahead:
            self.item.leave_the_last()

        def accumulate(dk: Any, dv: Any) -> Any:
            total = cta.walk(self.item, done, lambda streaming: DkvTile(self, streaming).run(dk, dv))
            return *(read(acc, in_flight=0, interpret=plan.simulate) for acc in (dk, dv)), total

        shapes = [(ROWS, plan.head_dim), (ROWS, plan.v_head_dim)]
        dk, dv, total = with_zeros(accumulate, self.buffers[:2], shapes, interpret=plan.simulate)
        self.store(dk, dv)
        return total

    def store(self, dk: Any, dv: Any) -> None:
        plan, results = self.plan, self.cta.results
        k_tile, v_tile = self.memory.k.at[self.place], self.memory.v.at[self.place]
        if not plan.float32_results:
            k_tile[...] = (dk * plan.rule.scale).astype(plan.dtype)
            v_tile[...] = dv.astype(plan.dtype)
            plgpu.commit_smem()
        b, kv_head, kv_start, exists = self.cta.keys(self.item)  # again: they need not live through the loops
        parts = self.cta.work.parts
        if parts > 1:
            piece = self.item(PIECE)
            exists &= piece < 0

            @when(piece >= 0)
            def _store_part() -> None:
                at = self.item(PAIR), lax.div(piece, parts), lax.rem(piece, parts), pl.ds(self.cta.wg * ROWS, ROWS)
                results.dk_parts.at[at][...] = dk * plan.rule.scale
                results.dv_parts.at[at][...] = dv

        @when(exists)
        def _store() -> None:
            rows = pl.ds(kv_start, ROWS)
            if plan.float32_results:
                results.dk.at[b, rows, kv_head][...] = dk * plan.rule.scale
                results.dv.at[b, rows, kv_head][...] = dv
                return
            plgpu.copy_smem_to_gmem(k_tile, results.dk.at[b, rows, kv_head])
            plgpu.copy_smem_to_gmem(v_tile, results.dv.at[b, rows, kv_head])


class DkvTile:
    """A tile of queries of one head against the warpgroup's keys, in parts of `width` queries."""

    def __init__(self, column: Column, streaming: Streaming) -> None:
        self.column, self.cta, self.plan = column, column.cta, column.plan
        self.memory, self.streaming = column.memory, streaming
        self.simulate, self.masked = column.plan.simulate, streaming.masked
        self.queries, self.d_outs = column.cta.slots(streaming.n, column.cta.ring)
        self.q_start = streaming.start if self.plan.has_bias else 0
        plan = self.plan
        self.width = PART if plan.one_copy or self.masked or not plan.rule.folds_lse else plan.tile

    def run(self, dk: Any, dv: Any) -> None:
        plan = self.plan
        self.queries.wait()
        self.d_outs.wait()
        for part in range(plan.tile // self.width):
            near = None
            if plan.one_copy and plan.skips:
                attended = functools.partial(self.attended, part)
                near = lax.fori_loop(0, as_number(self.masked), attended, jnp.bool_(True))
                when(~near)(self.d_outs.release)
            elif plan.skips and self.masked:
                near = self.attended(part)
            bits = self.streaming.bits
            run_where(
                functools.partial(self.multiply, dk, dv, part), near, None if bits is None else bits.any(part * PART)
            )
        if not plan.one_copy and self.masked:
            self.d_outs.release()
        self.queries.release()

    def attended(self, part: int, *_: Any) -> Any:
        return self.plan.elements.may_attend(*self.place(part))

    def meets_the_band(self, part: int) -> Any:
        """Whether the band excludes some element of a part."""
        return jnp.logical_not(self.plan.elements.all_attend(*self.place(part)))

    def place(self, part: int) -> tuple[Any, int, Any, int]:
        first = self.cta.q_vectors["index"][*self.queries.at, part * self.width]
        return first, self.plan.packing.queries, self.column.kv_start, ROWS

    def multiply(self, dk: Any, dv: Any, part: int) -> None:
        memory, queries = self.memory, pl.ds(part * self.width, self.width)
        s = wgmma_full((ROWS, self.width), 0.0)
        if self.plan.rule.folds_lse:
            s = over_columns(memory.statistic.at[*self.queries.at, queries])
        dp = over_columns(memory.delta.at[*self.d_outs.at, queries])
        buffers = [x.at[:, pl.ds(0, self.width)] for x in self.column.buffers[2:]]
        products = functools.partial(self.products, dk, dv, part)
        with_values(products, buffers, [s, dp], interpret=self.simulate)

    def products(self, dk: Any, dv: Any, part: int, s_acc: Any, dp_acc: Any) -> None:
        plan, memory, column, width = self.plan, self.memory, self.column, self.width
        rule, masked, simulate = plan.rule, self.masked, self.simulate
        queries, start = pl.ds(part * width, width), self.q_start + part * width
        q_tile, do_tile = memory.q.at[*self.queries.at, queries], memory.do.at[*self.d_outs.at, queries]
        # S and dP, transposed: keys by queries
        own = opaque(column.place, interpret=simulate)
        mma(s_acc, memory.k.at[own], q_tile, transpose_b=True, interpret=simulate)
        mma(dp_acc, memory.v.at[own], do_tile, transpose_b=True, interpret=simulate)
        s = read(s_acc, in_flight=1, interpret=simulate)
        # P, while dP is computed
        bits = self.streaming.bits

        def allowed(bits: Any) -> Any:
            return self.cta.element_mask(self.queries, queries, column.kv_start, column.kv_rows, bits, part)

        def with_band(_: Any, s: Any) -> Any:
            return jnp.where(allowed(None), s, -jnp.inf)

        mask = None
        if plan.one_copy:
            s = lax.fori_loop(0, as_number(masked), with_band, s)
        elif masked and plan.band_apart:
            s = lax.fori_loop(0, as_number(self.meets_the_band(part)), with_band, s)
            mask = bits.tile(None, part * width, 0, (ROWS, width), 1)
        elif masked:
            mask = allowed(bits)
        p, weight = rule.probabilities(
            s,
            None if rule.folds_lse else over_columns(memory.statistic.at[*self.queries.at, queries]),
            self.bias(start) if plan.has_bias else None,
            mask,
        )
        # dV, while dS is computed
        mma(dv, p.astype(plan.dtype), do_tile, interpret=simulate)
        ds = weight * read(dp_acc, in_flight=1, interpret=simulate)
        # dK
        mma(dk, ds.astype(plan.dtype), q_tile, interpret=simulate)
        if plan.one_copy or (not masked and (part + 1) * width == plan.tile):
            if not simulate:
                plgpu.wgmma_wait(1)
            self.d_outs.release()

    def bias(self, start: Any) -> Any:
        column, shape = self.column, (ROWS, self.width)
        return bias_tile(self.cta.given.bias, column.batch, self.streaming.head, column.kv_start, start, shape)
