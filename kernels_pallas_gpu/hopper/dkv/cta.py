"""A CTA of the Hopper dK/dV kernel: its warpgroups share operands, shared memory and columns of keys."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.dkv.plan import COLUMN, PAIR, PIECE, START, DkvMemory, DkvPlan, HandOver
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS
from xsake.kernels_pallas_gpu.hopper.tile.bits import TileBits
from xsake.kernels_pallas_gpu.hopper.tile.key_runs import KeyRuns
from xsake.kernels_pallas_gpu.hopper.tile.logits import PART
from xsake.kernels_pallas_gpu.hopper.tile.row_lists import list_coords
from xsake.kernels_pallas_gpu.hopper.tile.vectors import ALONG_COLS, ALONG_ROWS
from xsake.kernels_pallas_gpu.hopper.work.items import ItemRefs
from xsake.kernels_pallas_gpu.hopper.work.plan import StreamBarriers
from xsake.kernels_pallas_gpu.hopper.work.streaming import PLAIN, ListTiles, Slot, StreamingCta
from xsake.kernels_pallas_gpu.hopper.work.turns import Item


class DkvOperands(NamedTuple):
    """`statistic`: lse as `LogitRule.row_statistic` gives it. `lists`: of columns. `interleaved`: the result of
    `Columns.interleaved`. `counter`: the number of the next item.
    """

    q: Any
    k: Any
    v: Any
    d_out: Any
    statistic: Any
    minus_delta: Any
    q_vectors: dict[str, Any]
    kv_vectors: dict[str, Any]
    lists: Any
    interleaved: Any
    bias: Any
    bits: Any
    counter: Any


class DkvResults(NamedTuple):
    """`dk_parts`, `dv_parts`: float32 sums of the parts of early columns, or None."""

    dk: Any
    dv: Any
    dk_parts: Any
    dv_parts: Any


class Streaming(NamedTuple):
    """Tile number `n` of queries, of one head. `masked`: whether its elements are tested, which is known while tracing
    unless `DkvPlan.one_copy`. `bits`: the tile's bits, where the mask has bitmaps.
    """

    n: Any
    head: Any
    tiles: ListTiles
    masked: Any
    bits: TileBits | None

    @property
    def start(self) -> Any:
        """The first query."""
        return self.tiles.start_of(self.n)


class DkvCta(StreamingCta[DkvPlan]):
    """Takes one item of work after another: a column of keys, or the part of it that has some of the group's heads."""

    def __init__(
        self,
        plan: DkvPlan,
        given: DkvOperands,
        results: DkvResults,
        memory: DkvMemory,
        barriers: StreamBarriers,
        hand_over: HandOver,
        items: ItemRefs,
    ) -> None:
        super().__init__(plan, given, results, memory, barriers, items)
        self.hand_over = hand_over
        self.bits = given.bits if plan.run is None else KeyRuns(given.bits.number, plan.run, plan.block_kv, self.wg)
        self.q_vectors = {name: memory.q_vectors.at[i] for i, name in enumerate(plan.q_vectors)}
        self.residents, self.resident_packing = ((given.k, memory.k), (given.v, memory.v)), PLAIN
        numbers = [(given.statistic, memory.statistic)]
        numbers += [(x, self.q_vectors[name]) for name, x in given.q_vectors.items()]
        of_do = [(given.minus_delta, memory.delta)]
        self.stream(
            plan.packing.rows,
            outer=dict(source=given.q, tiles=memory.q, numbers=numbers, packing=plan.packing),
            inner=dict(source=given.d_out, tiles=memory.do, numbers=of_do, packing=plan.packing),
        )

    def coords(self, pair: Any) -> Callable[[Any], tuple[Any, Any]]:
        """The lists of the group's heads."""
        plan, (b, kv_head) = self.plan, self.head(pair)
        return lambda g: list_coords(
            self.given.lists,
            b,
            kv_head * plan.group + g,
            num_q_heads=plan.num_q_heads,
            num_kv_heads=plan.num_kv_heads,
        )

    def keys(self, item: Item) -> tuple[Any, Any, Any, Any]:
        """(batch, K/V head, index of the first key, whether there are keys) of a compute warpgroup's item."""
        start = self.of_ring(item, START)
        first = self.first_row(start, self.wg)
        return *self.head(item(PAIR)), first, start >= 0

    def heads(self, piece: Any) -> tuple[Any, Any]:
        """(first, end) of an item's heads in the group."""
        group, parts = self.plan.group, self.work.parts
        if parts == 1:
            return 0, group
        first = lax.rem(lax.max(piece, 0), parts) * (group // parts)
        return first, jnp.where(piece < 0, group, first + group // parts)

    def walk(self, item: Item, done: Any, step: Callable[[Streaming], None]) -> Any:
        """Calls `step` for each tile of an item, head after head, numbered from `done` on; returns the end."""
        plan, streamed, bits = self.plan, self.streamed, self.bits
        coords, column = self.coords(item(PAIR)), self.of_ring(item, COLUMN)
        exists = True if self.work.all_exist else self.of_ring(item, START) >= 0

        def head(g: Any, first: Any) -> Any:
            h = lax.rem(item(PAIR), plan.num_kv_heads) * plan.group + g
            tiles = ListTiles(streamed, coords(g), first, *streamed.span(coords(g), column, exists)[:3])

            def of_bits(n: Any, bitmap: Any, masked: bool) -> None:
                own = None if bitmap is None else TileBits(bits, coords(g), bitmap, tiles.row_of(n), plan.packing)
                step(Streaming(n, h, tiles, masked, own))

            if plan.one_copy:
                either = lambda n, _: step(Streaming(n, h, tiles, n >= tiles.full_end, None))  # noqa: E731
                lax.fori_loop(first, tiles.end, either, None)
            else:
                tiles.walk(bits, of_bits)
            return tiles.end

        return head(0, done) if plan.group == 1 else lax.fori_loop(*self.heads(item(PIECE)), head, done)

    def element_mask(
        self, slot: Slot, queries: Any, kv_start: Any, kv_rows: dict[str, Any], own_bits: TileBits | None, part: int
    ) -> Any:
        q = {name: plgpu.load(r.at[*slot.at, queries], layout=ALONG_COLS) for name, r in self.q_vectors.items()}
        kv_index = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ALONG_ROWS) + kv_start
        ok = self.plan.elements.attends(
            (ROWS, PART),
            q.get("position", q.get("index")),
            kv_rows.get("position", kv_index),
            q_segment=q.get("segment"),
            kv_segment=kv_rows.get("segment"),
        )
        kv_first = lax.rem(kv_start, self.plan.block_kv)
        return ok if own_bits is None else own_bits.tile(ok, part * PART, kv_first, (ROWS, PART), 1)
