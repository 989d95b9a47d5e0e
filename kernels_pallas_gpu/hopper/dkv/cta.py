"""What the warpgroups of a CTA in the Hopper dK/dV kernel share: operands, shared memory, columns of keys."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.dkv.plan import (
    COLUMN,
    FIELDS_OF_RING,
    PAIR,
    PIECE,
    START,
    Barriers,
    HandOver,
    Plan,
    Scratch,
)
from xsake.kernels_pallas_gpu.hopper.tile.backward import ALONG_COLS, ALONG_ROWS, PART, ROWS, Streamed
from xsake.kernels_pallas_gpu.hopper.tile.bits import TileBits
from xsake.kernels_pallas_gpu.hopper.tile.common import list_coords
from xsake.kernels_pallas_gpu.hopper.tile.turns import Item
from xsake.kernels_pallas_gpu.hopper.tile.turns import Scratch as Turn


class Operands(NamedTuple):
    """`statistic`: lse as `LogitRule.row_statistic` gives it. `lists`: of columns. `interleaved`: what
    `Columns.interleaved` says. `counter`: the number of the next item.
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


class Results(NamedTuple):
    """`dk_parts`, `dv_parts`: float32 sums of the parts of early columns, or None."""

    dk: Any
    dv: Any
    dk_parts: Any
    dv_parts: Any


class Streaming(NamedTuple):
    """Tile number `n` of queries, of one head. `masked`: whether its elements are tested, which is known while tracing
    unless `Plan.one_copy`. `bits`: what the mask's bitmaps say of them.
    """

    n: Any
    head: Any
    start_of: Callable[[Any], Any]
    masked: Any
    bits: TileBits | None


class Cta:
    """Takes one item of work after another: a column of keys, or the part of it that has some of the group's heads."""

    def __init__(
        self,
        plan: Plan,
        given: Operands,
        results: Results,
        scratch: Scratch,
        barriers: Barriers,
        hand_over: HandOver,
        turn: Turn,
    ) -> None:
        self.plan, self.given, self.results, self.scratch, self.barriers = plan, given, results, scratch, barriers
        self.hand_over, self.turn, self.work, self.turns = hand_over, turn, plan.work, plan.turns
        self.q_vectors = {name: scratch.q_vectors.at[i] for i, name in enumerate(plan.q_vectors)}
        self.wg = lax.axis_index("wg")
        self.streamed = Streamed(
            lists=given.lists, full_is_exact=plan.full_is_exact, block=plan.packing.rows, tile=plan.tile
        )
        self.ring = 0 if self.work.rings == 1 else self.wg  # of a compute warpgroup

    def coords(self, pair: Any) -> Callable[[Any], tuple[Any, Any]]:
        """The lists of the group's heads."""
        plan = self.plan
        b, kv_head = lax.div(pair, plan.num_kv_heads), lax.rem(pair, plan.num_kv_heads)
        return lambda g: list_coords(
            self.given.lists,
            b,
            kv_head * plan.group + g,
            num_q_heads=plan.num_q_heads,
            num_kv_heads=plan.num_kv_heads,
        )

    def keys(self, item: Item) -> tuple[Any, Any, Any, Any]:
        """(batch, K/V head, index of the first key, whether there are keys) of a compute warpgroup's item."""
        plan, start = self.plan, item(START + FIELDS_OF_RING * self.ring)
        is_first = plan.split or self.work.rings > 1  # of both warpgroups together, or of this one's own ring
        first = pl.multiple_of(jnp.maximum(start, 0), ROWS) + (0 if is_first else self.wg * ROWS)
        return lax.div(item(PAIR), plan.num_kv_heads), lax.rem(item(PAIR), plan.num_kv_heads), first, start >= 0

    def load_keys(self, b: Any, kv_start: Any, kv_head: Any, place: Any) -> None:
        rows, given, scratch = pl.ds(kv_start, ROWS), self.given, self.scratch
        for ref, smem in ((given.k, scratch.k), (given.v, scratch.v)):
            plgpu.copy_gmem_to_smem(ref.at[b, rows, kv_head], smem.at[place], self.barriers.resident.at[place])

    def heads(self, piece: Any) -> tuple[Any, Any]:
        """(first, end) of an item's heads in the group."""
        group, parts = self.plan.group, self.work.parts
        if parts == 1:
            return 0, group
        first = lax.rem(lax.max(piece, 0), parts) * (group // parts)
        return first, jnp.where(piece < 0, group, first + group // parts)

    def walk(self, item: Item, done: Any, step: Callable[[Streaming], None]) -> Any:
        """Calls `step` for each tile of an item, head after head, numbered from `done` on; returns the end."""
        plan, streamed, bits = self.plan, self.streamed, self.given.bits
        coords, column = self.coords(item(PAIR)), item(COLUMN + FIELDS_OF_RING * self.ring)
        exists = True if self.work.all_exist else item(START + FIELDS_OF_RING * self.ring) >= 0

        def head(g: Any, n: Any) -> Any:
            begin, full_tiles, tiles = streamed.span(coords(g), column, exists)

            def bitmap_of(m: Any) -> Any:
                slot = begin + lax.div(m - n, streamed.per_block)
                return None if bits is None else bits.of_slot(coords(g), slot)

            def at(m: Any, masked: Any, own_bits: TileBits | None = None) -> None:
                step(Streaming(m, h, lambda m: streamed.start(coords(g), begin, m - n), masked, own_bits))

            def masked_step(m: Any, bitmap: Any) -> Any:
                following = bitmap_of(m + 1)  # read long before it is needed
                row = lax.rem(m - n, streamed.per_block) * plan.tile
                at(m, True, None if bits is None else TileBits(bits, coords(g), bitmap, row, plan.packing))
                return following

            h = lax.rem(item(PAIR), plan.num_kv_heads) * plan.group + g
            if plan.one_copy:
                lax.fori_loop(n, n + tiles, lambda m, _: at(m, m >= n + full_tiles), None)
                return n + tiles
            lax.fori_loop(n, n + full_tiles, lambda m, _: at(m, False), None)
            lax.fori_loop(n + full_tiles, n + tiles, masked_step, bitmap_of(n + full_tiles))
            return n + tiles

        return head(0, done) if plan.group == 1 else lax.fori_loop(*self.heads(item(PIECE)), head, done)

    def slots(self, n: Any) -> tuple[Any, Any]:
        """Of tile n, in the rings of Q and dO."""
        config = self.plan.config
        return lax.rem(n, config.stages), lax.rem(n, config.inner_stages)

    def element_mask(
        self, slot: Any, queries: Any, kv_start: Any, kv_rows: dict[str, Any], own_bits: TileBits | None, part: int
    ) -> Any:
        q = {name: plgpu.load(r.at[self.ring, slot, queries], layout=ALONG_COLS) for name, r in self.q_vectors.items()}
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
