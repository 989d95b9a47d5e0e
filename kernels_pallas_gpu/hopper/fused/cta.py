"""A CTA of the fused Hopper backward: its warpgroups share operands, shared memory and a column of keys."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from xsake.kernels_pallas_gpu.hopper.fused.plan import KEYS, FusedBarriers, FusedMemory, FusedPlan
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing
from xsake.kernels_pallas_gpu.hopper.tile.row_lists import list_coords
from xsake.kernels_pallas_gpu.hopper.work.streaming import PLAIN, Span, Stream, Streamed


class FusedOperands(NamedTuple):
    """`statistic`: lse as `LogitRule.row_statistic` gives it. `steps`: 1 / unit of dQ, or None. `lists`: of columns.
    `interleaved`: the result of `Columns.interleaved`.
    """

    q: Any
    k: Any
    v: Any
    d_out: Any
    statistic: Any
    minus_delta: Any
    steps: Any
    q_vectors: dict[str, Any]
    kv_vectors: dict[str, Any]
    lists: Any
    interleaved: Any
    bias: Any
    bits: Any
    dq: Any


class FusedResults(NamedTuple):
    """`dk_parts`, `dv_parts`: float32 sums of the parts of early columns, or None. `dq_per_cta`: each CTA's own sums of
    dQ if the kernel is interpreted, otherwise None.
    """

    dk: Any
    dv: Any
    dk_parts: Any
    dv_parts: Any
    dq_per_cta: Any


class FusedCta:
    """This CTA multiplies the column's tiles of queries from `lo` to `hi`, numbered over all heads of the group."""

    def __init__(
        self, plan: FusedPlan, given: FusedOperands, results: FusedResults, memory: FusedMemory, barriers: FusedBarriers
    ) -> None:
        self.plan, self.given, self.results, self.memory, self.barriers = plan, given, results, memory, barriers
        self.q_ring, self.do_ring = self.streams()
        self.wg = lax.axis_index("wg")
        self.number = lax.axis_index("cta")
        self.pair, self.rank, self.part = plan.columns.place(self.number, given.interleaved)
        self.batch, self.kv_head = lax.div(self.pair, plan.num_kv_heads), lax.rem(self.pair, plan.num_kv_heads)
        self.streamed = Streamed(
            lists=given.lists, full_is_exact=plan.full_is_exact, block=plan.block_q, tile=plan.tile
        )
        per_block = plan.columns_per_block
        self.block = given.lists.ranked(*self.coords(0), lax.div(self.rank, per_block))
        self.kv_start = (self.block * per_block + lax.rem(self.rank, per_block)) * KEYS
        total = lax.fori_loop(0, plan.group, lambda g, n: n + self.column(g).num_tiles, jnp.int32(0))
        self.lo, self.hi = jnp.int32(0), total
        if plan.parts > 1:
            early = self.is_early
            self.lo = jnp.where(early, lax.div(total * self.part, plan.parts), 0)
            self.hi = jnp.where(early, lax.div(total * (self.part + 1), plan.parts), total)

    def streams(self) -> tuple[Stream, Stream]:
        """The streams of Q and of dO."""
        plan, given, memory, barriers = self.plan, self.given, self.memory, self.barriers
        numbers = [(given.statistic, memory.statistic)]
        numbers += [(given.steps.rows, memory.row_steps)] if plan.deterministic else []
        numbers += [(x, memory.q_vectors[name]) for name, x in given.q_vectors.items()]
        of_both = dict(packing=PLAIN, interpret=plan.simulate)
        of_q = dict(ready=barriers.q_ready, free=barriers.q_free, stages=plan.config.q_stages)
        of_do = dict(ready=barriers.do_ready, free=barriers.do_free, stages=plan.config.do_stages)
        return (
            Stream(**of_both, **of_q, source=given.q, tiles=memory.q, numbers=numbers),
            Stream(
                **of_both, **of_do, source=given.d_out, tiles=memory.do, numbers=[(given.minus_delta, memory.delta)]
            ),
        )

    @property
    def is_early(self) -> Any:
        return self.rank < self.plan.early

    def coords(self, g: Any) -> tuple[Any, Any]:
        plan, head = self.plan, self.head(g)
        return list_coords(
            self.given.lists, self.batch, head, num_q_heads=plan.num_q_heads, num_kv_heads=plan.num_kv_heads
        )

    def head(self, g: Any) -> Any:
        return self.kv_head * self.plan.group + g

    def column(self, g: Any) -> Span:
        """The list of the column in the group's head g."""
        return self.streamed.span(self.coords(g), self.block, True)

    def walk(self, step: Callable, carry: Any, *, by_kind: bool) -> Any:
        """`carry = step(n, carry, column, masked)` for each of the CTA's tiles, n counting from 0.

        `column` has the tiles of one head. Tiles of full blocks are not `masked`, which is known while tracing if
        `by_kind`.
        """
        plan = self.plan

        def walk_head(g: Any, walked: Any) -> Any:
            number, carry = walked
            begin, full_tiles, tiles, _ = self.column(g)
            column = HeadColumn(self, self.head(g), self.coords(g), begin, self.lo - number)

            def run(first: Any, last: Any, carry: Any, is_masked: Callable) -> Any:
                if plan.parts > 1:
                    first, last = lax.max(first, self.lo), lax.min(last, self.hi)
                return lax.fori_loop(
                    first - self.lo, last - self.lo, lambda n, c: step(n, c, column, is_masked(n)), carry
                )

            full_end, end = number + full_tiles, number + tiles
            if not by_kind:
                return end, run(number, end, carry, lambda n: n + self.lo >= full_end)
            carry = run(number, full_end, carry, lambda n: False)
            return end, run(full_end, end, carry, lambda n: True)

        first = jnp.int32(0), carry
        return (walk_head(0, first) if plan.group == 1 else lax.fori_loop(0, plan.group, walk_head, first))[1]


class HeadColumn(NamedTuple):
    """The tiles of queries of one head that list the CTA's column; its tile n is number n + `ahead` of the list."""

    cta: FusedCta
    head: Any
    coords: tuple[Any, Any]
    begin: Any
    ahead: Any

    def start_of(self, n: Any) -> Any:
        """The first query of tile n."""
        return self.cta.streamed.start(self.coords, self.begin, n + self.ahead)

    def bits(self, n: Any, kv_start: Any, shape: tuple[int, int]) -> Any:
        """bool[keys, queries] of tile n and the keys from `kv_start` on."""
        bits, plan, tile, per_block = self.cta.given.bits, self.cta.plan, n + self.ahead, self.cta.streamed.per_block
        slot, offset = self.begin + lax.div(tile, per_block), lax.rem(tile, per_block) * plan.tile
        kv_first = lax.rem(kv_start, jnp.int32(plan.block_kv))
        return bits.tile(
            self.coords, bits.of_slot(self.coords, slot), offset, kv_first, shape, 1, Packing(1, plan.block_q)
        )
