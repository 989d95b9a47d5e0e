"""A compute warpgroup of the Hopper dQ kernel: 64 queries against all keys that they list, a tile at a time.

Three products per tile of keys: S and dP, and with dS as it comes in registers, dQ.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.dq.cta import DqCta
from xsake.kernels_pallas_gpu.hopper.dq.plan import BEGIN, FULL, PAIR, START, TILES
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS
from xsake.kernels_pallas_gpu.hopper.tile.bits import TileBits
from xsake.kernels_pallas_gpu.hopper.tile.conditions import run_where, when
from xsake.kernels_pallas_gpu.hopper.tile.logits import PART
from xsake.kernels_pallas_gpu.hopper.tile.products import mma, opaque, read, wgmma_full, with_values, with_zeros
from xsake.kernels_pallas_gpu.hopper.tile.vectors import (
    ALONG_COLS,
    ALONG_ROWS,
    WGMMA,
    bias_tile,
    keys_of_runs,
    load_rows,
)
from xsake.kernels_pallas_gpu.hopper.work.streaming import ListTiles
from xsake.kernels_pallas_gpu.hopper.work.turns import Item


class Queries:
    """An item: 64 queries and their dO."""

    def __init__(self, cta: DqCta, item: Item) -> None:
        self.cta, self.plan, self.item = cta, cta.plan, item
        self.batch, self.head = cta.head(item(PAIR))
        self.coords = cta.coords(item(PAIR))
        self.start = self.first_row()
        self.first_query = cta.plan.packing.first_query(self.start)
        self.place = item.place * cta.plan.compute_wgs + cta.wg
        self.buffers = [x.at[cta.wg] for x in cta.memory.simulated]
        self.out: Any = None
        self.statistic: Any = None
        self.minus_delta: Any = None
        self.vectors: dict[str, Any] = {}

    def first_row(self) -> Any:
        return self.cta.first_row(self.cta.of_ring(self.item, START), self.cta.wg)

    def run(self, done: Any) -> Any:
        """`done`: tiles of the items before; returns that with this item's."""
        cta, plan, item = self.cta, self.plan, self.item
        if not plan.ahead:
            cta.load_residents(self.batch, self.start, self.head, self.place)
        self.load_numbers()
        begin, num_full, num_tiles = (cta.of_ring(item, field) for field in (BEGIN, FULL, TILES))
        tiles = ListTiles(cta.streamed, self.coords, done, begin, num_full, num_tiles)
        plgpu.barrier_wait(cta.barriers.resident.at[self.place])
        if plan.sums_delta:
            self.sum_delta()
        if plan.ahead:
            item.leave_the_last()

        def accumulate(dq: Any) -> Any:
            tiles.walk(cta.given.bits, lambda *at: DqTile(self, tiles, *at).run(dq))
            return read(dq, in_flight=0, interpret=plan.simulate)

        shapes = [(ROWS, plan.head_dim)]
        self.store(with_zeros(accumulate, self.buffers[:1], shapes, interpret=plan.simulate))
        return done + cta.of_ring(item, TILES)

    def load_numbers(self) -> None:
        plan, given, rows = self.plan, self.cta.given, pl.ds(self.start, ROWS)
        delta = given.minus_delta.d_lse if plan.sums_delta else given.minus_delta
        self.statistic, self.minus_delta = [
            None if x is None else plgpu.load(x.at[self.batch, self.head, rows], layout=ALONG_ROWS, optimized=False)
            for x in (given.statistic, delta)
        ]
        if plan.sums_delta:
            # Into registers, for shared memory has no room for it, and before the wait for Q and dO.
            self.out = plgpu.load(given.minus_delta.out.at[self.batch, rows, self.head], layout=WGMMA, optimized=False)
        self.vectors = load_rows(given.q_vectors, self.batch, rows)

    def sum_delta(self) -> None:
        do_tile = self.cta.memory.do.at[self.place]
        products = self.out.astype(jnp.float32) * plgpu.load(do_tile, layout=WGMMA).astype(jnp.float32)
        weight = jnp.sum(products, axis=1)
        total = -weight if self.minus_delta is None else self.minus_delta - weight
        self.minus_delta = jnp.where(self.plan.rule.attends_nothing(self.statistic), 0.0, total)

        @when(self.cta.of_ring(self.item, START) >= 0)
        def _keep() -> None:
            self.cta.results.minus_delta[self.batch, self.head, pl.ds(self.start, ROWS)] = self.minus_delta

    def store(self, dq: Any) -> None:
        plan, tile = self.plan, self.cta.memory.q.at[self.place]
        tile[...] = (dq * plan.rule.scale).astype(plan.dtype)
        plgpu.commit_smem()

        @when(self.cta.of_ring(self.item, START) >= 0)
        def _store() -> None:
            b, h = self.cta.head(self.item(PAIR))  # again: they need not live through the loops
            plan.packing.store(tile, self.cta.results.dq, b, self.first_row(), h)


class DqTile:
    """A tile of keys against the warpgroup's queries, in parts of `width` keys. `masked`: whether elements are tested.
    `bitmap`: the number that `Bits` takes, if the mask has bitmaps.
    """

    def __init__(self, queries: Queries, tiles: ListTiles, n: Any, bitmap: Any, masked: bool) -> None:
        self.queries, self.cta, self.plan, self.masked = queries, queries.cta, queries.plan, masked
        cta, plan = self.cta, self.plan
        self.bits = None
        if bitmap is not None:
            row = lax.rem(queries.start, plan.packing.rows)
            self.bits = TileBits(cta.given.bits, queries.coords, bitmap, row, plan.packing)
        self.keys, self.values = cta.slots(n, cta.ring)
        self.tiles, self.n = tiles, n
        self.start = tiles.start_of(n) if plan.has_bias else 0
        self.width = PART if masked or not plan.rule.folds_lse else plan.tile

    def run(self, dq: Any) -> None:
        self.keys.wait()
        if not self.waits_for_values_late:
            self.values.wait()
        parts = self.plan.tile // self.width
        if self.masked:
            # A loop in the kernel: every copy of the code takes time to compile.
            lax.fori_loop(0, parts, lambda part, _: self.multiply_allowed(dq, part), None)
            self.values.release()
        else:
            for part in range(parts):
                self.multiply(dq, part)
        self.keys.release()

    @property
    def waits_for_values_late(self) -> bool:
        """Whether S is multiplied while the only tile of values is still on its way."""
        return not self.masked and self.plan.config.inner_stages == 1

    def multiply_allowed(self, dq: Any, part: Any) -> None:
        """Multiply a part, unless the band or the bits exclude all of its elements."""
        plan, elements = self.plan, self.plan.elements
        near, live = None, None if self.bits is None else self.bits.any(0)
        if plan.gathers:
            place = self.queries.first_query, plan.packing.queries
            runs = [elements.may_attend(*place, start, plan.unit) for start in self.starts(part)]
            near = functools.reduce(operator.or_, runs)
        elif plan.skips:
            first_key = self.cta.kv_vectors["index"][*self.keys.at, part * self.width]
            place = self.queries.first_query, plan.packing.queries, first_key, self.width
            near = elements.may_attend(*place)
            if plan.bits_alone:
                whole = elements.all_attend(*place)
                run_where(functools.partial(self.multiply, dq, part, ruled=False), whole, live)
                near &= ~whole
        run_where(functools.partial(self.multiply, dq, part), near, live)

    def multiply(self, dq: Any, part: Any, *, ruled: bool = True) -> None:
        """`ruled`: whether elements are tested by more than the bits."""
        queries, width = self.queries, self.width
        s = wgmma_full((ROWS, width), 0.0)
        if self.plan.rule.folds_lse:
            s = self.per_row(queries.statistic)
        buffers = [x.at[:, pl.ds(0, width)] for x in queries.buffers[1:]]
        products = functools.partial(self.products, dq, part, ruled)
        with_values(products, buffers, [s, self.per_row(queries.minus_delta)], interpret=self.plan.simulate)

    def per_row(self, x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(x, (ROWS, self.width), [0])

    def products(self, dq: Any, part: Any, ruled: bool, s_acc: Any, dp_acc: Any) -> None:
        plan, memory, queries, width = self.plan, self.cta.memory, self.queries, self.width
        rule, simulate = plan.rule, plan.simulate
        keys, start = pl.ds(part * width, width), self.start + part * width
        k_tile, v_tile = memory.k.at[*self.keys.at, keys], memory.v.at[*self.values.at, keys]
        # S and dP
        own = opaque(queries.place, interpret=simulate)
        mma(s_acc, memory.q.at[own], k_tile, transpose_b=True, interpret=simulate)
        if self.waits_for_values_late and part == 0:
            self.values.wait()
        mma(dp_acc, memory.do.at[own], v_tile, transpose_b=True, interpret=simulate)
        s = read(s_acc, in_flight=1, interpret=simulate)
        # P, while dP is computed
        _, weight = rule.probabilities(
            s,
            None if rule.folds_lse else self.per_row(queries.statistic),
            self.bias(start) if plan.has_bias else None,
            self.element_mask(keys, part, ruled) if self.masked else None,
        )
        # dS
        dp = read(dp_acc, in_flight=0, interpret=simulate)
        if not self.masked and (part + 1) * width == plan.tile:
            self.values.release()
        # dQ
        mma(dq, (weight * dp).astype(plan.dtype), k_tile, interpret=simulate)

    def bias(self, start: Any) -> Any:
        queries, shape = self.queries, (ROWS, self.width)
        return bias_tile(self.cta.given.bias, queries.batch, queries.head, queries.start, start, shape)

    def starts(self, part: Any) -> list[Any]:
        """The first key of each run in a part."""
        runs = PART // self.plan.unit
        return [self.cta.memory.starts[(*self.keys.at, part * runs + run)] for run in range(runs)]

    def element_mask(self, keys: Any, part: Any, ruled: bool) -> Any:
        plan, queries, shape = self.plan, self.queries, (ROWS, PART)
        kv_first = self.tiles.row_of(self.n) + part * PART
        if not ruled:
            return self.bits.tile(None, 0, kv_first, shape, 0)
        vectors = self.cta.kv_vectors
        kv = {name: plgpu.load(x.at[*self.keys.at, keys], layout=ALONG_COLS) for name, x in vectors.items()}
        if plan.gathers:
            kv["index"] = keys_of_runs(self.starts(part), PART)
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ALONG_ROWS)
        ok = plan.elements.attends(
            shape,
            queries.vectors.get("position", plan.packing.query(row) + queries.first_query),
            kv.get("position", kv.get("index")),
            q_segment=queries.vectors.get("segment"),
            kv_segment=kv.get("segment"),
            kv_index=kv.get("index"),
        )
        return ok if self.bits is None else self.bits.tile(ok, 0, kv_first, shape, 0)
