"""The memory warpgroup of the Hopper forward: reads the block lists, and loads queries, keys and values.

Global memory is slow, so that everything is read ahead. While an item is loaded, the row and the list of the next item
are read; the number of the item after that is requested first and used last.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backend.contract import stored_head
from xsake.kernels_pallas_gpu.hopper.forward import pages
from xsake.kernels_pallas_gpu.hopper.forward.config import WG_ROWS, Pairing
from xsake.kernels_pallas_gpu.hopper.forward.cta import ForwardCta, slot_of
from xsake.kernels_pallas_gpu.hopper.forward.plan import PUBLISHED, ForwardItem
from xsake.kernels_pallas_gpu.hopper.tile.conditions import as_number, when
from xsake.kernels_pallas_gpu.hopper.tile.row_lists import list_coords
from xsake.kernels_pallas_gpu.hopper.work.items import dealt
from xsake.kernels_pallas_gpu.hopper.work.tickets import take_ticket
from xsake.kernels_pallas_gpu.lists.row_pairs import OWNERS
from xsake.kernels_pallas_gpu.lists.work_order import MOST_PARTS

# The first key of a run that does not exist; it is below every key.
MISSING = -(1 << 30)


class MemoryWarpgroup:
    def __init__(self, cta: ForwardCta) -> None:
        self.cta, self.plan = cta, cta.plan
        self.capacity = jnp.int32(cta.lists.indices.shape[-1])
        self.num_items = cta.options["count"][0] if self.plan.cuts_rows else jnp.int32(self.plan.num_items)
        self.consumers = (cta.ring,) if self.plan.pairing is Pairing.APART else range(self.plan.compute_wgs)

    def run(self) -> None:
        cta, plan = self.cta, self.plan
        item = self.read_item(cta.worker, self.read_row(cta.worker))
        cta.items.publish(jnp.int32(0), item[:PUBLISHED])
        turns, steps = jnp.int32(0), jnp.int32(0)
        if plan.persistent:

            def one_turn(carry: Any) -> Any:
                turn, step0, item, next_number = carry
                following, after_next = self.load_item(turn, step0, item, next_number)
                cta.items.publish(turn + 1, following[:PUBLISHED])
                return turn + 1, step0 + item.steps, following, after_next

            carry = (turns, steps, item, dealt(jnp.int32(1), cta.worker, plan.num_workers))
            turns, steps, *_ = lax.while_loop(lambda c: c[2].steps >= 0, one_turn, carry)
        else:

            @pl.loop(0, as_number(item.steps >= 0))
            def _only(turn: Any) -> None:
                self.load_only_item(turn, item)

            turns, steps = as_number(item.steps >= 0), lax.max(item.steps, jnp.int32(0))
        if plan.interpret:
            self.drain(turns, steps)

    def drain(self, turns: Any, steps: Any) -> None:
        """Wait for every barrier that completed and was not waited for: the interpreter requires it."""
        cta, barriers = self.cta, self.cta.barriers

        def observe(use: Any, barrier: Any) -> None:
            when(use >= 0)(lambda: plgpu.barrier_wait(barrier))

        when(turns > 0)(lambda: cta.items.wait_until_left(turns - 1))
        for use in (turns - 1 - i for i in range(self.plan.q_stages)):
            for consumer in self.consumers:
                observe(use, barriers.q_free.at[cta.query_slot(use, consumer)])
        for use in (steps - 1 - i for i in range(self.plan.stages)):
            observe(use, cta.stage(barriers.k_free, slot_of(use, self.plan.stages)))
            observe(use, cta.stage(barriers.v_free, slot_of(use, self.plan.stages)))

    # -- which item ----------------------------------------------------------------------------------------------------

    def list_coords(self, batch: Any, head: Any) -> tuple[Any, Any]:
        plan = self.plan
        return list_coords(self.cta.lists, batch, head, num_q_heads=plan.num_q_heads, num_kv_heads=plan.num_kv_heads)

    def place(self, number: Any) -> tuple[Any, Any, Any, Any]:
        """(batch, head, rank of the mask row, tile in the row) of an item.

        Items are numbered section by section, a section being `head_group` heads, and inside a section rank by rank:
        the longest rows of all its heads come first. A number past the end gets the last item, which is then only read.
        """
        plan = self.plan
        section, rest = _divmod(lax.min(number, self.num_items - 1), plan.head_group * plan.tiles_per_head)
        tile, head = _divmod(rest, plan.head_group)
        batch, head = _divmod(section * plan.head_group + head, plan.head_tiles)
        rank, sub = _divmod(tile, plan.subtiles)
        return batch, head * plan.heads_per_tile, rank, sub

    def place_by_length(self, number: Any) -> tuple[Any, Any, Any]:
        """(section, place in the section's order, tile in the row) of an item."""
        plan, number = self.plan, lax.min(number, self.num_items - 1)
        if plan.cuts_rows:  # there are more items than tiles
            return jnp.int32(0), number, jnp.int32(0)
        section, rest = _divmod(number, plan.head_group * plan.tiles_per_head)
        return section, *_divmod(rest, plan.subtiles)

    def read_row(self, number: Any) -> Any:
        """The mask row of an item; where rows come by length, its row and part as `WorkOrder.items` has them."""
        if self.plan.by_length:
            section, place, _ = self.place_by_length(number)
            return self.cta.options["items"][section, place]
        batch, head, rank, _ = self.place(number)
        return self.cta.lists.ranked(*self.list_coords(batch, head), rank)

    def where(self, number: Any, found: Any) -> tuple[Any, Any, Any, Any]:
        """(batch, head, mask row, tile in the row) of an item, for which `read_row` returned `found`.

        By length there is one head per tile: heads of a pair share their lists.
        """
        plan = self.plan
        if not plan.by_length:
            batch, head, _, sub = self.place(number)
            return batch, head, found, sub
        section, _, sub = self.place_by_length(number)
        head, row = _divmod(lax.div(found, jnp.int32(MOST_PARTS)), plan.num_rows)
        return *_divmod(section * plan.head_group + head, plan.head_tiles), row, sub

    def part(self, found: Any, entries: Any) -> tuple[Any, Any, Any]:
        """(first entry, entries, where the results go) of a row's part, for which `read_row` returned `found`."""
        if not self.plan.cuts_rows:
            return jnp.int32(0), entries, jnp.int32(-1)
        row, part = _divmod(found, MOST_PARTS)
        first, last = _divmod(self.cta.options["parts_of"][0, row], MOST_PARTS)
        begin, end = (lax.div(entries * i, last + 1) for i in (part, part + 1))
        return begin, end - begin, jnp.where(last > 0, first + part, -1)

    def read_item(self, number: Any, found: Any) -> ForwardItem:
        lists, plan, capacity = self.cta.lists, self.plan, self.capacity
        batch, head, row, sub = self.where(number, found)
        b, h = self.list_coords(batch, head)
        begin = lax.min(lists.row_ptr[b, h, row], capacity)
        if plan.pairing is Pairing.UNION:
            entries, part = (self.cta.options[name][b, h, row] for name in ("num_entries", "by_turns"))
            skipped = jnp.int32(0)
        else:
            entries = lax.min(lists.row_ptr[b, h, row + 1], capacity) - begin
            skipped, entries, part = self.part(found, entries)
        begin += skipped
        full = lists.num_full[b, h, row] if plan.full_is_exact else jnp.int32(0)
        full = lax.clamp(jnp.int32(0), full - skipped, entries)
        units = entries * plan.units_per_block
        steps = lax.div(units + (plan.parts - 1), jnp.int32(plan.parts))
        return ForwardItem(
            batch=batch,
            head=head,
            q_start=row * plan.row_size + sub * plan.tile_rows,
            part=part,
            begin=lax.min(begin, capacity - 1),  # a tile with no keys may begin past the last slot
            units=units,
            full_steps=lax.div(full * plan.units_per_block, jnp.int32(plan.parts)),
            steps=jnp.where(number < self.num_items, lax.max(steps, jnp.int32(1)) if plan.ahead else steps, -1),
        )

    def ask_after_next(self) -> Any:
        return take_ticket(self.cta.counter[0]) if self.plan.dynamic else None

    def read_after_next(self, turn: Any, ticket: Any) -> Any:
        cta, num_workers = self.cta, self.plan.num_workers
        if not self.plan.dynamic:
            return dealt(turn + 2, cta.worker, num_workers)
        return cta.items.ticket(turn, lambda: ticket) + 2 * num_workers

    # -- loading an item -----------------------------------------------------------------------------------------------

    def load_only_item(self, turn: Any, item: ForwardItem) -> None:
        load = _Load(self, turn, item)
        self.load_queries(turn, item)
        pl.loop(0, item.steps)(load.step)

    def load_item(self, turn: Any, step0: Any, item: ForwardItem, next_number: Any) -> tuple[ForwardItem, Any]:
        """Returns the next item, and the number of the item after the next; either may be past the end."""
        load = _Load(self, step0, item)
        ticket = self.ask_after_next()
        next_row = self.read_row(next_number)
        self.load_queries(turn, item)
        last = item.steps - 1
        pl.loop(0, last)(load.step)
        runs = load.runs(lax.max(last, jnp.int32(0)))
        places = load.places(runs)
        when(last >= 0)(lambda: load.keys(last, runs, places))
        following = self.read_item(next_number, next_row)
        when(last >= 0)(lambda: load.values(last, runs, places))
        return following, self.read_after_next(turn, ticket)

    def load_queries(self, turn: Any, item: ForwardItem) -> None:
        cta, plan = self.cta, self.plan
        for consumer in self.consumers:
            slot = cta.query_slot(turn, consumer)
            when(turn >= plan.q_stages)(lambda slot=slot: plgpu.barrier_wait(cta.barriers.q_free.at[slot]))
            row = pl.multiple_of(item.q_start, WG_ROWS) + (consumer * WG_ROWS if plan.pairing.halves_rows else 0)
            head = item.head + (consumer if plan.pairing is Pairing.HEADS else 0)
            plan.packing.load(cta.q, item.batch, row, head, cta.memory.q.at[slot], cta.barriers.q_ready.at[slot])


class _Run(NamedTuple):
    """`owners`: which warpgroups have the run in their list, as `lists.row_pairs` says it; None if all have it."""

    start: Any
    owners: Any


class _Load:
    """Loads an item's keys and values, step by step."""

    def __init__(self, memory: MemoryWarpgroup, step0: Any, item: ForwardItem) -> None:
        self.cta, self.plan, self.step0, self.item = memory.cta, memory.plan, step0, item
        self.kv_head = lax.div(item.head, jnp.int32(self.plan.group))
        self.b, self.h = memory.list_coords(item.batch, item.head)

    def step(self, step: Any) -> None:
        runs = self.runs(step)
        places = self.places(runs)
        self.keys(step, runs, places)
        self.values(step, runs, places)

    def runs(self, step: Any) -> list[_Run]:
        """The runs of a step; a run past the end repeats the last run."""
        return [self._run(step, part) for part in range(self.plan.parts)]

    def _run(self, step: Any, part: int) -> _Run:
        entry, sub = self._entry(step, part)
        block, owners = self.cta.lists.indices[self.b, self.h, self.item.begin + entry], None
        if self.plan.pairing is Pairing.UNION:
            block, owners = _divmod(block, OWNERS)
            # The list of a pair without keys may begin with any number.
            block = lax.clamp(jnp.int32(0), block, jnp.int32(pl.cdiv(self.plan.kv_len, self.plan.block_kv) - 1))
        return _Run(block * self.plan.block_kv + sub, owners)

    def _entry(self, step: Any, part: int) -> tuple[Any, Any]:
        """(entry of the list, first key in its block) of a run."""
        item, plan = self.item, self.plan
        last_unit = lax.max(item.units, jnp.int32(1)) - 1
        unit_index = lax.min(step * plan.parts + part, last_unit) if plan.parts > 1 else step
        entry, sub = _divmod(unit_index, plan.units_per_block)
        return entry, sub * plan.unit

    def places(self, runs: Sequence[_Run]) -> Sequence[Any]:
        """Where each run lies: with pages a place of `forward.pages`, otherwise the first key itself."""
        if self.plan.page is None:
            return [run.start for run in runs]
        places = self.cta.options["places"]
        last = jnp.int32(places.shape[1] - 1)
        numbers = [lax.div(run.start, jnp.int32(self.plan.unit)) for run in runs]
        # A list of no blocks may begin with any number.
        return [places[self.item.batch, lax.clamp(jnp.int32(0), number, last)] for number in numbers]

    def keys(self, step: Any, runs: Sequence[_Run], places: Sequence[Any]) -> None:
        cta, item, plan, memory = self.cta, self.item, self.plan, self.cta.memory
        slot = self._free_slot(step, cta.barriers.k_free)
        for part, run in enumerate(runs):
            exists = step * plan.parts + part < item.units if part or plan.ahead else True
            for reader in range(plan.readers):
                listed = exists if run.owners is None else exists & (run.owners & (1 << reader) != 0)
                note = run.start if listed is True else jnp.where(listed, run.start, MISSING)
                memory.notes[cta.run_field(slot, part, reader)] = note
        for part in range(plan.parts if plan.has_bits else 0):
            entry, _ = self._entry(step, part)
            number = cta.options["number"][self.b, self.h, item.begin + entry]
            exists = step * plan.parts + part < item.units
            memory.notes[cta.bitmap_field(slot, part)] = jnp.where(exists, number, 0) if part else number
        ready = cta.stage(cta.barriers.k_ready, slot)
        self._tokens(False, cta.stage(memory.k, slot), ready, places)
        for name in plan.kv_vectors:
            starts = [run.start for run in runs]
            self._runs(cta.options[name].at[item.batch], cta.stage(memory.kv_vectors[name], slot), ready, starts)

    def values(self, step: Any, runs: Sequence[_Run], places: Sequence[Any]) -> None:
        cta, plan = self.cta, self.plan
        slot = self._free_slot(step, cta.barriers.v_free)
        values, ready = cta.stage(cta.memory.v, slot), cta.stage(cta.barriers.v_ready, slot)
        if not plan.zeroes_padding:
            self._tokens(True, values, ready, places)
            return
        ((start, _),), (place,) = runs, places
        mixed = pages.is_mixed(place)
        when(jnp.logical_not(mixed))(lambda: self._tokens(True, values, ready, places))

        @when(mixed)
        def _zero() -> None:
            landed = cta.stage(cta.barriers.v_landed, 0)
            self._tokens(True, values, landed, places)
            plgpu.barrier_wait(landed)
            pages.zero_padding(values, cta.options["kv_segments"].at[self.item.batch, pl.ds(start, plan.unit)])
            plgpu.commit_smem()
            plgpu.barrier_arrive(ready)

    def _tokens(self, value: bool, dst: Any, ready: Any, places: Sequence[Any]) -> None:
        """Loads runs of keys or of values."""
        ref, plan = self.cta.v if value else self.cta.k, self.plan
        head = stored_head(self.kv_head, joined_kv=plan.joined_kv, value=value)
        if plan.page is None:
            self._runs(ref.at[self.item.batch, :, head], dst, ready, places)
        else:
            self._runs(ref.at[0, :, head], dst, ready, [pages.run_of(p) * plan.unit for p in places])

    def _free_slot(self, step: Any, free: Any) -> Any:
        slot = slot_of(self.step0 + step, self.plan.stages)
        use = self.step0 + step
        when(use >= self.plan.stages)(lambda: plgpu.barrier_wait(self.cta.stage(free, slot)))
        return slot

    def _runs(self, src: Any, dst: Any, ready: Any, starts: Sequence[Any]) -> None:
        unit = self.plan.unit
        for part, start in enumerate(starts):
            dst_run = dst if self.plan.parts == 1 else dst.at[pl.ds(part * unit, unit)]
            plgpu.copy_gmem_to_smem(src.at[pl.ds(start, unit)], dst_run, ready)


def _divmod(x: Any, n: int) -> tuple[Any, Any]:
    if n == 1:
        return x, jnp.int32(0)
    return lax.div(x, jnp.int32(n)), lax.rem(x, jnp.int32(n))
