"""A compute warpgroup of the Hopper forward: per query tile, an online softmax over the keys as they arrive."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.forward.config import WG_ROWS, Pairing
from xsake.kernels_pallas_gpu.hopper.forward.cta import ForwardCta, slot_of
from xsake.kernels_pallas_gpu.hopper.forward.plan import BATCH, BY_TURNS, FULL_STEPS, HEAD, PART, Q_START, STEPS
from xsake.kernels_pallas_gpu.hopper.forward.softmax import Softmax, Sums
from xsake.kernels_pallas_gpu.hopper.tile.bits import Bits
from xsake.kernels_pallas_gpu.hopper.tile.conditions import as_number, when
from xsake.kernels_pallas_gpu.hopper.tile.logits import LN2, LOG2E, soft_cap_tanh
from xsake.kernels_pallas_gpu.hopper.tile.products import matmul, matmul_add
from xsake.kernels_pallas_gpu.hopper.tile.row_lists import list_coords
from xsake.kernels_pallas_gpu.hopper.tile.vectors import (
    ALONG_COLS,
    ALONG_ROWS,
    WGMMA,
    bias_tile,
    keys_of_runs,
    per_col,
    per_row,
)

# Keys that a partial step may leave out together: a causal or window band often excludes half of a tile.
HALF = 64


class ComputeWarpgroup:
    """`row_offset`, `head_offset`: where this warpgroup's half of a query tile begins."""

    def __init__(self, cta: ForwardCta) -> None:
        self.cta, self.plan = cta, cta.plan
        self.row_offset = cta.wg * WG_ROWS if self.plan.pairing.halves_rows else 0
        self.head_offset = cta.wg if self.plan.pairing is Pairing.HEADS else 0

    # The two warpgroups alternate at the tensor core. It passes to the other one when both have arrived at the barrier
    # `tensor_core`: each arrives once and waits once per product. Work between the two is off the critical path.
    def yield_tensor_core(self) -> None:
        if self.plan.take_turns:
            plgpu.barrier_arrive(self.cta.barriers.tensor_core)

    def await_tensor_core(self) -> None:
        if self.plan.take_turns:
            plgpu.barrier_wait(self.cta.barriers.tensor_core)

    def run(self) -> None:
        cta, plan = self.cta, self.plan

        def let_the_other_multiply() -> None:
            self.yield_tensor_core()
            self.await_tensor_core()

        when(cta.wg == 1)(let_the_other_multiply)
        self.yield_tensor_core()
        steps, full_steps = self.read_item(jnp.int32(0))
        if plan.ahead:

            def one_turn_ahead(carry: Any) -> Any:
                turn, step0, steps, full_steps, first = carry
                return (
                    turn + 1,
                    step0 + steps,
                    *ForwardTile(self, turn, step0, steps, full_steps, first).run_and_begin_the_next(),
                )

            zero = jnp.int32(0)
            first = self.multiply_first(0, 0, steps, self.await_tensor_core)
            lax.while_loop(lambda c: c[2] >= 0, one_turn_ahead, (zero, zero, steps, full_steps, first))
        elif plan.persistent:

            def one_turn(carry: Any) -> Any:
                turn, step0, steps, full_steps = carry
                ForwardTile(self, turn, step0, steps, full_steps).run()
                return turn + 1, step0 + steps, *self.read_item(turn + 1)

            lax.while_loop(lambda c: c[2] >= 0, one_turn, (jnp.int32(0), jnp.int32(0), steps, full_steps))
        else:

            @pl.loop(0, as_number(steps >= 0))
            def _only(turn: Any) -> None:
                ForwardTile(self, turn, turn, steps, full_steps).run()

        if not plan.ahead:
            self.await_tensor_core()
        when(cta.wg == 0)(let_the_other_multiply)
        plgpu.wait_smem_to_gmem(0)

    def read_item(self, turn: Any) -> tuple[Any, Any]:
        items = self.cta.items
        items.wait(turn)
        return items(turn, STEPS), items(turn, FULL_STEPS)

    def multiply_first(self, turn: Any, step0: Any, steps: Any, overlap: Any) -> Any:
        """(raw logits of a tile's first step, first keys of its runs); past the last tile, unused numbers."""
        cta, barriers = self.cta, self.cta.barriers
        q_slot, slot = cta.query_slot(turn, cta.wg), slot_of(step0, self.plan.stages)

        @when(steps > 0)
        def _operands() -> None:
            plgpu.barrier_wait(barriers.q_ready.at[q_slot])
            plgpu.barrier_wait(cta.stage(barriers.k_ready, slot))

        queries, keys = cta.memory.q.at[q_slot], cta.stage(cta.memory.k, slot)
        logits = matmul(queries, keys, transpose_b=True, interpret=bool(self.plan.interpret), overlap=overlap)
        starts = self.starts(slot)
        when(steps > 0)(lambda: cta.release(cta.stage(barriers.k_free, slot)))
        return logits, starts

    def starts(self, slot: Any) -> tuple[Any, ...]:
        """The first key of each run in a slot of the K/V ring; negative for a run that this warpgroup leaves out."""
        return tuple(self.cta.memory.notes[self.cta.run_field(slot, part)] for part in range(self.plan.parts))


class ForwardTile:
    """A warpgroup's half of a query tile.

    `step0`: steps of this warpgroup in earlier tiles. `first`: the result of `multiply_first` for this tile, where it
    was called ahead.
    """

    def __init__(
        self, warpgroup: ComputeWarpgroup, turn: Any, step0: Any, steps: Any, full_steps: Any, first: Any = None
    ) -> None:
        self.warpgroup, self.cta, self.plan = warpgroup, warpgroup.cta, warpgroup.plan
        self.turn, self.step0, self.steps, self.full_steps, self.first = turn, step0, steps, full_steps, first
        self.q_slot = self.cta.query_slot(turn, self.cta.wg)
        self.q_tile = self.cta.memory.q.at[self.q_slot]
        self.q_vectors: dict[str, Any] = {}
        self.softmax = Softmax(self.plan)

    def field(self, which: int) -> Any:
        return self.cta.items(self.turn, which)

    def q_start(self) -> Any:
        return pl.multiple_of(self.field(Q_START), WG_ROWS) + self.warpgroup.row_offset

    def first_query(self) -> Any:
        return self.plan.packing.first_query(self.q_start())

    def slot(self, step: Any) -> Any:
        return slot_of(self.step0 + step, self.plan.stages)

    @property
    def short_runs(self) -> bool:
        """Whether 64 keys of a tile are several runs. Then runs that do not exist are masked, not left out."""
        return self.plan.unit < HALF

    def run(self) -> None:
        cta, barriers = self.cta, self.cta.barriers
        plgpu.barrier_wait(barriers.q_ready.at[self.q_slot])
        self.q_vectors = {
            name: plgpu.load(
                cta.options[name].at[self.field(BATCH), pl.ds(self.q_start(), WG_ROWS)],
                layout=ALONG_ROWS,
                optimized=False,
            )
            for name in self.plan.q_vectors
        }

        @when(self.steps > 0)
        def _first_keys() -> None:
            plgpu.barrier_wait(cta.stage(barriers.k_ready, slot_of(self.step0, self.plan.stages)))

        acc, m, total = self.attend(self.softmax.nothing(), jnp.int32(0))
        when(self.steps > 0)(self.warpgroup.yield_tensor_core)
        if self.plan.separate_out:
            cta.release(barriers.q_free.at[self.q_slot])
        self.write(acc, m, total)

    def run_and_begin_the_next(self) -> Any:
        """Returns the next tile's steps and full steps, and the result of `multiply_first` for it."""
        acc, m, total = self.attend(self.first_step(self.softmax.nothing()), jnp.int32(1))
        # Before the output is written: the other warpgroup need not wait for that.
        self.warpgroup.yield_tensor_core()
        if self.plan.separate_out:
            self.cta.release(self.cta.barriers.q_free.at[self.q_slot])
        following = self.warpgroup.read_item(self.turn + 1)

        def meanwhile() -> None:
            self.write(acc, m, total)
            self.warpgroup.await_tensor_core()

        first = self.warpgroup.multiply_first(self.turn + 1, self.step0 + self.steps, following[0], meanwhile)
        return *following, first

    def attend(self, sums: Sums, done: Any) -> Sums:
        """The sums after all steps from number `done` on: first the steps of full blocks, then the others."""
        if self.plan.full_is_exact:
            sums = lax.fori_loop(done, self.full_steps, lambda i, s: self.kv_step(i, s, partial=False), sums)
            done = lax.max(done, self.full_steps)
        if self.plan.pairing is Pairing.UNION:
            last = self.full_steps + self.field(BY_TURNS)
            own = functools.partial(self.kv_step, partial=False, half=self.cta.wg)
            sums = lax.fori_loop(done, last, own, sums)
            done = lax.max(done, last)
        sums = lax.fori_loop(done, self.steps, self.partial_step, sums)
        return self.softmax.total_of_rows(sums)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def first_step(self, carry: Any) -> Any:
        """Step 0, with the logits that `multiply_first` computed ahead."""
        logits, starts = self.first

        def with_rule(_: Any, logits: Any) -> Any:
            return jnp.where(self.element_mask(logits.shape, starts, {}, test_runs=True), logits, -jnp.inf)

        logits = self.element_wise(logits, None, {}, partial=False)
        logits = lax.fori_loop(0, as_number(self.full_steps == 0), with_rule, logits)
        values = self.cta.stage(self.cta.memory.v, slot_of(self.step0, self.plan.stages))
        return self.accumulate(0, carry, logits, values, self.softmax.weigh)

    def partial_step(self, step: Any, carry: Any) -> Any:
        plan = self.plan
        cta, notes, slot = self.cta, self.cta.memory.notes, self.slot(step)
        if plan.has_row_bits:
            return self.step_of_chosen(step, carry)
        if not plan.testable:
            return self.kv_step(step, carry, partial=True)
        if self.short_runs:
            return self.step_of_short_runs(step, carry)
        first_keys = [
            notes[cta.run_field(slot, 0)] + i * HALF if plan.parts == 1 else notes[cta.run_field(slot, i)]
            for i in range(plan.tile_kv // HALF)
        ]
        first, count = self.first_query(), plan.packing.queries
        live = [plan.elements.may_attend(first, count, key, HALF) & (key >= 0) for key in first_keys]

        num_live = sum(as_number(x) for x in live)
        when(num_live == 0)(lambda: self.idle_step(step))
        # Loops of one iteration or none, because the branches of a switch would take more registers.
        if len(live) == 2:
            half = as_number(live[1])
            carry = lax.fori_loop(
                0,
                as_number(num_live == 1),
                lambda _, c: self.kv_step(step, c, partial=True, half=half),
                carry,
            )
        return lax.fori_loop(
            0, lax.div(num_live, jnp.int32(len(live))), lambda _, c: self.kv_step(step, c, partial=True), carry
        )

    def step_of_short_runs(self, step: Any, carry: Any) -> Any:
        """A partial step of short runs: multiplies the whole tile if any run has an element that may attend."""
        plan, first, count = self.plan, self.first_query(), self.plan.packing.queries
        starts = self.warpgroup.starts(self.slot(step))
        live = [plan.elements.may_attend(first, count, start, plan.unit) & (start >= 0) for start in starts]
        any_live = functools.reduce(lambda a, b: a | b, live)
        when(~any_live)(lambda: self.idle_step(step))
        return lax.fori_loop(0, as_number(any_live), lambda _, c: self.kv_step(step, c, partial=True), carry)

    def step_of_chosen(self, step: Any, carry: Any) -> Any:
        """A partial step whose bits tell which rows attend to each run. Without a rule, runs of no row are skipped.

        Most runs lie wholly before the queries: their elements need no test beside the bits.
        """
        plan, cta, notes, slot = self.plan, self.cta, self.cta.memory.notes, self.slot(step)
        starts = self.warpgroup.starts(slot)
        live = [self.chosen(notes[cta.bitmap_field(slot, part)]) for part in range(plan.parts)]
        if plan.kv_vectors:
            plain = jnp.bool_(False)
        else:
            first, count = self.first_query(), plan.packing.queries
            inside = [plan.elements.all_attend(first, count, start, plan.unit) for start in starts]
            plain = functools.reduce(lambda a, b: a & b, [x | ~y for x, y in zip(inside, live, strict=True)])
        num_live = sum(as_number(x) for x in live)
        # Encode the step's path in one integer, so that only one value stays live across all branches.
        whole, halves, ruled = plan.parts, plan.parts + 1, plan.parts + 3
        way = num_live if plan.parts == 1 else jnp.where(num_live == 1, halves + as_number(live[1]), num_live)
        way = jnp.where((num_live > 0) & ~plain, ruled, way)
        when(way == 0)(lambda: self.idle_step(step))

        def where(condition: Any, carry: Any, **how: Any) -> Any:
            run = functools.partial(self.kv_step, partial=True, **how)
            return lax.fori_loop(0, as_number(condition), lambda _, c: run(step, c), carry)

        if not plan.kv_vectors:
            carry = where(way == whole, carry, ruled=False)
            if plan.parts > 1:
                carry = where((way == halves) | (way == halves + 1), carry, ruled=False, half=way - halves)
        return where(way == ruled, carry)

    def idle_step(self, step: Any) -> None:
        cta, barriers, slot = self.cta, self.cta.barriers, self.slot(step)
        self.take_tensor_core(step)
        plgpu.barrier_arrive(cta.stage(barriers.k_free, slot))
        self.warpgroup.yield_tensor_core()
        plgpu.barrier_wait(cta.stage(barriers.v_ready, slot))
        self.warpgroup.await_tensor_core()
        plgpu.barrier_arrive(cta.stage(barriers.v_free, slot))
        self.await_next_keys(step)

    def kv_step(self, step: Any, carry: Any, *, partial: bool, ruled: bool = True, half: Any = None) -> Any:
        """Multiplies one tile of keys; with `half` (0 or 1), only that half of the tile.

        `ruled`: whether the rule may exclude elements of a partial tile, or only the bits.
        """
        cta, plan, slot = self.cta, self.plan, self.slot(step)
        keys, values = cta.stage(cta.memory.k, slot), cta.stage(cta.memory.v, slot)
        starts = self.warpgroup.starts(slot) if partial or plan.has_bias else None
        if half is not None:
            keys, values = (ref.at[pl.ds(half * HALF, HALF)] for ref in (keys, values))
            if starts is not None:
                one = starts[0] + half * HALF if plan.parts == 1 else jnp.where(half == 0, starts[0], starts[1])
                starts = (one,)

        # QK
        logits = matmul(
            self.q_tile,
            keys,
            transpose_b=True,
            interpret=bool(plan.interpret),
            overlap=lambda: self.take_tensor_core(step),
        )
        kv_vectors, numbers = {}, ()
        if partial and plan.has_bits:
            numbers = tuple(cta.memory.notes[cta.bitmap_field(slot, part)] for part in range(plan.parts))
            if half is not None:
                numbers = (jnp.where(half == 0, *numbers),)
        if partial:
            for name in plan.kv_vectors:
                kv_vectors[name] = plgpu.load(cta.stage(cta.memory.kv_vectors[name], slot), layout=ALONG_COLS)
        cta.release(cta.stage(cta.barriers.k_free, slot))

        logits = self.element_wise(logits, starts, kv_vectors, partial=partial and ruled)
        if numbers:
            assert starts is not None
            logits = jnp.where(self.bits(numbers, starts[0], logits.shape), logits, -jnp.inf)
        trusted = plan.trusts_maximum and not partial
        weigh = self.softmax.weigh_by_old_maximum if trusted else self.softmax.weigh
        return self.accumulate(step, carry, logits, values, weigh)

    def bits(self, numbers: tuple[Any, ...], kv_start: Any, shape: tuple[int, int]) -> Any:
        cta, plan = self.cta, self.plan
        coords = list_coords(
            cta.lists,
            self.field(BATCH),
            self.field(HEAD) + self.warpgroup.head_offset,
            num_q_heads=plan.num_q_heads,
            num_kv_heads=plan.num_kv_heads,
        )
        kv_first = lax.rem(kv_start, plan.block_kv)
        number = numbers[0]
        for part, following in enumerate(numbers[1:], 1):
            column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
            number = jnp.where(column < part * plan.unit, number, following)
        return self.bit_refs.tile(coords, number, self.row_in_block(), kv_first, shape, 0, plan.packing)

    def chosen(self, number: Any) -> Any:
        return self.bit_refs.any(number, self.row_in_block(), self.plan.packing)

    @property
    def bit_refs(self) -> Bits:
        return Bits(self.cta.options["number"], self.cta.options.get("words"))

    def row_in_block(self) -> Any:
        return lax.rem(self.q_start(), self.plan.block_q)

    def take_tensor_core(self, step: Any) -> None:
        """For step 0, this warpgroup has arrived at the end of the item before."""
        when(step > 0)(self.warpgroup.yield_tensor_core)
        self.warpgroup.await_tensor_core()

    def await_next_keys(self, step: Any) -> None:
        @when(step + 1 < self.steps)
        def _wait() -> None:
            plgpu.barrier_wait(
                self.cta.stage(self.cta.barriers.k_ready, slot_of(self.step0 + step + 1, self.plan.stages))
            )

    def element_wise(self, logits: Any, starts: Any, kv_vectors: Any, *, partial: bool) -> Any:
        plan, shape = self.plan, logits.shape
        if not plan.plain_logits:
            logits = logits * jnp.float32(plan.scale)
        if plan.has_bias:
            batch, head = self.field(BATCH), self.field(HEAD) + self.warpgroup.head_offset
            logits = logits + bias_tile(self.cta.options["bias"], batch, head, self.q_start(), starts[0], shape)
        if plan.soft_cap is not None:
            logits = soft_cap_tanh(logits, plan.soft_cap) * jnp.float32(plan.soft_cap)
        if partial:
            mask = self.element_mask(shape, starts, kv_vectors, test_runs=self.short_runs)
            if mask is not None:
                logits = jnp.where(mask, logits, -jnp.inf)
        return logits

    def element_mask(self, shape: tuple[int, int], starts: Any, kv_vectors: Any, *, test_runs: bool) -> Any:
        """bool[queries, keys], or None where nothing is tested.

        `starts`: first keys of the tile's runs, which are of equal length. `test_runs`: test for runs that do not
        exist, which start below 0. Queries past the last are not tested: the store clips them.
        """
        plan, q_vectors, (rows, columns), first_query = self.plan, self.q_vectors, shape, self.first_query()
        # Along one axis: JAX would compute the number of each element of a tile for itself.
        row = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=ALONG_ROWS)
        query, key = plan.packing.query(row) + first_query, keys_of_runs(starts, columns)
        mask = plan.elements.attends(
            shape,
            q_vectors.get("q_positions", query),
            kv_vectors.get("kv_positions", key),
            q_segment=q_vectors.get("q_segments"),
            kv_segment=kv_vectors.get("kv_segments"),
            kv_index=key if plan.ragged else None,
        )
        if not test_runs:
            return mask
        exists = per_col(key >= 0, shape)
        return exists if mask is None else mask & exists

    def accumulate(self, step: Any, sums: Sums, logits: Any, values: Any, weigh: Any) -> Sums:
        """`weigh`: a method of `Softmax`."""
        cta, plan, barriers = self.cta, self.plan, self.cta.barriers
        slot = self.slot(step)
        # Compute the weights before the wait: if the compiler moved them behind it, they would delay the product. The
        # output is rescaled in a loop, which the compiler does not move.
        sums, weights = weigh(sums, logits)
        maximum, total, weights = lax.optimization_barrier((sums.maximum, sums.total, weights))
        self.warpgroup.yield_tensor_core()
        plgpu.barrier_wait(cta.stage(barriers.v_ready, slot))
        self.warpgroup.await_tensor_core()

        # PV
        out = matmul_add(
            sums.out, weights, values, interpret=bool(plan.interpret), overlap=lambda: self.await_next_keys(step)
        )
        cta.release(cta.stage(barriers.v_free, slot))
        return Sums(out, maximum, total)

    # -- output --------------------------------------------------------------------------------------------------------

    def write(self, acc: Any, m: Any, total: Any) -> None:
        cta, plan, memory = self.cta, self.plan, self.cta.memory
        batch, head, first_row = self.field(BATCH), self.field(HEAD) + self.warpgroup.head_offset, self.q_start()
        part = self.field(PART)
        cta.items.leave(self.turn)
        if plan.has_sinks:
            sink = self.sink(batch, head, first_row, m.shape) * jnp.float32(LOG2E)
            m_new = jnp.maximum(m, sink)
            alpha = jnp.exp2(m - m_new)
            acc *= per_row(alpha, acc.shape)
            total = total * alpha + jnp.exp2(sink - m_new)
            m = m_new
        inverse = jnp.where(total == 0.0, 0.0, 1.0 / total)
        acc *= per_row(inverse, acc.shape)
        # The store of the previous tile may still read the staging buffer. The wait also brings the four warps
        # together: where the output overwrites the queries, no warp may still multiply by them.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_tile = memory.out.at[cta.wg] if plan.separate_out else self.q_tile
        out_tile[...] = acc.astype(plan.dtype)
        lse_tile = memory.lse.at[cta.wg]
        lse_tile[...] = jnp.where(total == 0.0, -jnp.inf, m * jnp.float32(LN2) + jnp.log(total))
        plgpu.commit_smem()

        def store_row() -> None:
            plan.packing.store(out_tile, cta.out, batch, first_row, head, commit_group=False)
            plgpu.copy_smem_to_gmem(lse_tile, cta.lse.at[batch, head, pl.ds(first_row, WG_ROWS)], commit_group=False)

        def store_part() -> None:
            rows = pl.ds(self.warpgroup.row_offset, WG_ROWS)
            for tile, parts in zip((out_tile, lse_tile), cta.parts, strict=True):
                plgpu.copy_smem_to_gmem(tile, parts.at[part, rows], commit_group=False)

        if plan.cuts_rows:
            when(part < 0)(store_row)
            when(part >= 0)(store_part)
        else:
            store_row()
        plgpu.commit_smem_to_gmem_group()
        if not plan.separate_out:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(cta.barriers.q_free.at[self.q_slot])

    def sink(self, batch: Any, head: Any, row: Any, shape: tuple[int, ...]) -> Any:
        sinks = self.cta.options["sink_lse"]
        sinks = sinks.at[batch if sinks.shape[0] > 1 else 0, head]
        if self.plan.packing.group == 1:
            return lax.broadcast_in_dim(sinks[0], shape, [])
        rows = pl.ds(lax.rem(row, jnp.int32(self.plan.block_q)), WG_ROWS)
        return plgpu.load(sinks.at[rows], layout=ALONG_ROWS, optimized=False)
