"""Tiles that are streamed past resident rows, through two rings of shared memory.

A CTA of the dQ or dK/dV kernel takes one item of work after another (`work.turns`). Each of its compute warpgroups
holds 64 *resident* rows of the item, and its memory warpgroup streams the tiles that the rows' lists name: dQ holds
queries and dO and streams keys and values, dK/dV holds keys and values and streams queries and dO.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS
from xsake.kernels_pallas_gpu.hopper.tile.bits import Bits
from xsake.kernels_pallas_gpu.hopper.tile.conditions import when
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing
from xsake.kernels_pallas_gpu.hopper.tile.products import release
from xsake.kernels_pallas_gpu.hopper.tile.row_lists import ListRefs
from xsake.kernels_pallas_gpu.hopper.work.items import ItemRefs
from xsake.kernels_pallas_gpu.hopper.work.plan import StreamBarriers, StreamingPlan
from xsake.kernels_pallas_gpu.hopper.work.turns import Item

PLAIN = Packing(1, ROWS)  # of rows that are not packed


class Span(NamedTuple):
    """A list: its first entry, tiles of full blocks, tiles of all blocks, and the entry after its last."""

    begin: Any
    num_full: Any
    num_tiles: Any
    end: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streamed:
    """The tiles that are streamed past resident rows: those of the blocks in a list.

    A tile is one run of rows, or, where blocks are shorter than tiles, `runs` of them from blocks that follow one
    another in the list. The last tile of full blocks holds full blocks alone: those left over come with the others.
    """

    lists: ListRefs
    full_is_exact: bool
    block: int
    tile: int

    @property
    def unit(self) -> int:
        """Rows of a run."""
        return math.gcd(self.block, self.tile)

    @property
    def runs(self) -> int:
        return self.tile // self.unit

    @property
    def per_block(self) -> int:
        return self.block // self.unit

    def span(self, coords: tuple[Any, Any], row: Any, exists: Any) -> Span:
        begin, full_end, end = self.lists.row(*coords, row)
        full, total = full_end - begin if self.full_is_exact else jnp.int32(0), end - begin
        if exists is not True:
            full, total = jnp.where(exists, full, 0), jnp.where(exists, total, 0)
        full, total = full * self.per_block, total * self.per_block
        if self.runs > 1:
            full, total = lax.div(full, jnp.int32(self.runs)), lax.div(total + (self.runs - 1), jnp.int32(self.runs))
        return Span(begin, full, total, end)

    def start(self, coords: tuple[Any, Any], begin: Any, t: Any) -> Any:
        """The first row of run t of a list."""
        block = self.lists.indices[(*coords, begin + lax.div(t, self.per_block))]
        return block * self.block + lax.rem(t, self.per_block) * self.unit

    def starts(self, coords: tuple[Any, Any], span: Span, t: Any, missing: int) -> list[Any]:
        """The first row of each run of tile t; `missing` where the list has no more runs."""
        if self.runs == 1:
            return [self.start(coords, span.begin, t)]
        number = [t * self.runs + i for i in range(self.runs)]
        last = (span.end - span.begin) * self.per_block - 1
        found = [self.start(coords, span.begin, lax.min(n, last)) for n in number]
        return [jnp.where(n <= last, start, missing) for n, start in zip(number, found, strict=True)]


class ListTiles(NamedTuple):
    """The tiles of one list: tiles of full blocks first, which need no element test, then the others.

    `first`: the number of its first tile in the item. `begin`: its first list entry.
    """

    streamed: Streamed
    coords: tuple[Any, Any]
    first: Any
    begin: Any
    num_full: Any
    num_tiles: Any

    @property
    def full_end(self) -> Any:
        return self.first + self.num_full

    @property
    def end(self) -> Any:
        return self.first + self.num_tiles

    def start_of(self, n: Any) -> Any:
        """The first row of tile n."""
        return self.streamed.start(self.coords, self.begin, n - self.first)

    def row_of(self, n: Any) -> Any:
        """The first row of tile n, as a number in its block."""
        return lax.rem(n - self.first, self.streamed.per_block) * self.streamed.tile

    def walk(self, bits: Bits | None, step: Callable[[Any, Any, bool], None]) -> None:
        """`step(n, bitmap, masked)` for each tile. `bitmap`: of a masked tile, what `Bits` takes for `number`."""

        def bitmap_of(n: Any) -> Any:
            entry = self.begin + lax.div(n - self.first, self.streamed.per_block)
            return None if bits is None else bits.of_slot(self.coords, entry)

        def masked_step(n: Any, bitmap: Any) -> Any:
            following = bitmap_of(n + 1)  # read long before it is needed
            step(n, bitmap, True)
            return following

        lax.fori_loop(self.first, self.full_end, lambda n, _: step(n, None, False), None)
        lax.fori_loop(self.full_end, self.end, masked_step, bitmap_of(self.full_end))


class Slot(NamedTuple):
    """The place of a tile in a ring, with its barriers."""

    at: tuple[Any, ...]
    ready: Any
    free: Any
    interpret: bool

    def wait(self) -> None:
        """Until all copies of the tile have arrived."""
        plgpu.barrier_wait(self.ready)

    def release(self) -> None:
        release(self.free, interpret=self.interpret)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """Barriers of a ring of `stages` tiles, or of several such rings: `ring` then says which."""

    ready: Any
    free: Any
    stages: int
    interpret: bool

    def slot(self, n: Any, *ring: Any) -> Slot:
        at = *ring, lax.rem(n, self.stages)
        return Slot(at, self.ready.at[at], self.free.at[at], self.interpret)

    def drain(self, count: Any, *ring: Any) -> None:
        """Waits for the last releases: the interpreter requires that every completed barrier was waited for."""
        for i in range(self.stages):
            when(i < count)(lambda i=i: plgpu.barrier_wait(self.slot(count - 1 - i, *ring).free))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream(Ring):
    """A ring, and what goes through it: tiles of `source` [B, T, H, D] to `tiles`; beside them numbers of the same rows
    [B | 1, T] or [B, H, T], each to its own buffer. `starts`: the buffer of the first rows of a tile's runs, or None.
    """

    source: Any
    tiles: Any
    numbers: Sequence[tuple[Any, Any]]
    packing: Packing
    starts: Any = None

    def load(self, n: Any, slot: Slot, batch: Any, head: Any, starts: Sequence[Any]) -> None:
        """Loads tile n, whose runs begin at `starts`, when the tile before has left the slot."""
        when(n >= self.stages)(lambda: plgpu.barrier_wait(slot.free))
        for run, start in enumerate(starts if self.starts is not None else ()):
            self.starts[(*slot.at, run)] = start
        tile, unit = self.tiles.at[slot.at], self.tiles.shape[-2] // len(starts)
        for run, start in enumerate(starts):
            part = tile if len(starts) == 1 else tile.at[pl.ds(run * unit, unit)]
            self.packing.load(self.source, batch, start, head, part, slot.ready)
        for x, buffer in self.numbers:
            (start,) = starts
            rows = pl.ds(start, self.tiles.shape[-2])
            at = (batch, head, rows) if len(x.shape) == 3 else (0 if x.shape[0] == 1 else batch, rows)
            plgpu.copy_gmem_to_smem(x.at[at], buffer.at[slot.at], slot.ready)


class StreamingCta[P: StreamingPlan]:
    """What the warpgroups of a CTA share. `given`, `results` and `memory` are named tuples of refs; a compute warpgroup
    reads a tile of `outer` first and last in a step, a tile of `inner` between.
    """

    outer: Stream
    inner: Stream
    residents: tuple[tuple[Any, Any], tuple[Any, Any]]  # operands and buffers of the resident rows
    resident_packing: Packing

    def __init__(
        self, plan: P, given: Any, results: Any, memory: Any, barriers: StreamBarriers, items: ItemRefs
    ) -> None:
        self.plan, self.given, self.results, self.memory = plan, given, results, memory
        self.barriers, self.work, self.turns = barriers, plan.work, plan.turns
        self.notes = plan.turns.notes(items)
        self.wg = lax.axis_index("wg")
        self.ring = 0 if self.work.rings == 1 else self.wg  # of a compute warpgroup

    def stream(self, block: int, *, outer: dict[str, Any], inner: dict[str, Any]) -> None:
        """Declare both streams.

        `block`: rows per streamed block. `outer`, `inner`: each `Stream`'s source, tiles, numbers and packing.
        """
        plan, barriers = self.plan, self.barriers
        self.streamed = Streamed(lists=self.given.lists, full_is_exact=plan.full_is_exact, block=block, tile=plan.tile)
        of_outer = dict(ready=barriers.outer_ready, free=barriers.outer_free, stages=plan.config.stages)
        of_inner = dict(ready=barriers.inner_ready, free=barriers.inner_free, stages=plan.config.inner_stages)
        self.outer = Stream(**of_outer, **outer, interpret=plan.simulate)
        self.inner = Stream(**of_inner, **inner, interpret=plan.simulate)

    def head(self, pair: Any) -> tuple[Any, Any]:
        """(batch, head) of a pair."""
        heads = self.plan.held_heads
        return lax.div(pair, heads), lax.rem(pair, heads)

    def of_ring(self, item: Item, which: int) -> Any:
        """This ring's value of a field that each ring has for itself."""
        return item(which + self.plan.FIELDS[1] * self.ring)

    def first_row(self, start: Any, wg: Any) -> Any:
        """The first row of a compute warpgroup, in an item whose ring has rows from `start` on."""
        row = pl.multiple_of(jnp.maximum(start, 0), ROWS)
        return row + wg * ROWS if self.work.unit > ROWS else row

    def load_residents(self, batch: Any, row: Any, head: Any, place: Any) -> None:
        for source, tiles in self.residents:
            self.resident_packing.load(source, batch, row, head, tiles.at[place], self.barriers.resident.at[place])

    def load_tile(self, n: Any, ring: int, batch: Any, head: Any, coords: tuple[Any, Any], span: Span, t: Any) -> None:
        """Tile t of a list; n counts the ring's tiles."""
        outer, inner = self.slots(n, ring)
        starts = self.streamed.starts(coords, span, t, self.plan.missing)
        self.outer.load(n, outer, batch, head, starts)
        self.inner.load(n, inner, batch, head, starts)

    def slots(self, n: Any, ring: Any) -> tuple[Slot, Slot]:
        return self.outer.slot(n, ring), self.inner.slot(n, ring)

    def share_the_work(self, roles: Sequence[Callable], load_item: Callable) -> None:
        """`roles`: of the compute warpgroups, or one for all. `counts = load_item(cta, turn, number, counts)`, in the
        memory warpgroup, publishes an item and loads its tiles; `counts` are the tiles of every ring up to there.
        """
        plan, config = self.plan, self.plan.config

        def compute(role: Callable) -> None:
            plgpu.set_max_registers(config.compute_registers, action="increase")
            self.turns.take(self.notes, lambda item, done: role(self, item).run(done), jnp.int32(0))

        if len(roles) == 1:
            when(self.wg < plan.compute_wgs)(lambda: compute(roles[0]))
        else:
            for wg, role in enumerate(roles):
                when(self.wg == wg)(lambda role=role: compute(role))

        @when(self.wg == plan.compute_wgs)
        def _memory() -> None:
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            load, none = functools.partial(load_item, self), (jnp.int32(0),) * self.work.rings
            counts = self.turns.deal(self.notes, self.given.counter, load, none)
            for ring, count in enumerate(counts if plan.simulate else []):
                self.outer.drain(count, ring)
                self.inner.drain(count, ring)
