"""Block-sparse attention, forward, for Hopper: (out, lse) from compressed block lists.

Three warpgroups a CTA: two compute 64 query rows each, one reads the block lists and keeps K and V coming. The CTA
walks its share of query tiles (longest first), and the loads of the next tile overlap the end of the current one.

The two compute warpgroups share K and V, so they need one block list between them (`Pairing`): neighbouring rows of
one mask row, or two query heads of one group. Where neither is so, each has its own list, ring and memory warpgroup.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.hads.rule import Band
from xsake.kernels_pallas_gpu import mosaic_common as common
from xsake.kernels_pallas_gpu.mosaic_common import LN2, LOG2E, LOWEST, ElementRule, ListRefs, RowLists
from xsake.kernels_pallas_gpu.mosaic_forward_config import WG_ROWS, ForwardConfig, Pairing

# Keys that a partial step takes or leaves: a causal or window band often empties half of a tile.
HALF = 64
# First key of a run that does not exist: before every key.
MISSING = -(1 << 30)
# Columns after which an accumulator's layout repeats: sums over every eighth column stay in a thread.
LANE_COLUMNS = 8
L2_BYTES = 50 << 20


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lists: RowLists,
    *,
    block_q: int,
    block_kv: int,
    scale: float,
    band: Band,
    soft_cap: float | None = None,
    full_is_exact: bool = True,
    q_segments: jax.Array | None = None,
    kv_segments: jax.Array | None = None,
    q_positions: jax.Array | None = None,
    kv_positions: jax.Array | None = None,
    bias: jax.Array | None = None,
    sink_lse: jax.Array | None = None,
    config: ForwardConfig,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, H, Dv] in q's dtype and lse f32[B, H, T] (natural log, sinks included)."""
    batch_size, q_len, num_q_heads, head_dim = q.shape
    _, kv_len, num_kv_heads, v_head_dim = v.shape
    pairing = Pairing.choose(block_q, lists.indices.shape[1], num_q_heads, num_kv_heads, max(head_dim, v_head_dim))
    num_kv_vectors = (q_segments is not None) + (q_positions is not None or kv_positions is not None)
    dtype = q.dtype
    group = num_q_heads // num_kv_heads
    rule = ElementRule(q_len=q_len, kv_len=kv_len, band=band)

    # Work: an item is a query tile. A worker is whoever walks items: the CTA, or each half of it where they work apart.
    compute_wgs = 1 if pairing is Pairing.ALONE else 2
    workers_a_cta = 2 if pairing is Pairing.APART else 1
    take_turns = config.take_turns and pairing in (Pairing.ROWS, Pairing.HEADS)
    heads_a_tile = 2 if pairing is Pairing.HEADS else 1
    tile_rows = 2 * WG_ROWS if pairing is Pairing.ROWS else WG_ROWS
    subtiles = block_q // tile_rows
    num_rows = pl.cdiv(q_len, block_q)
    tiles_a_head = num_rows * subtiles
    head_tiles = num_q_heads // heads_a_tile
    heads = batch_size * head_tiles
    num_items = heads * tiles_a_head
    num_ctas = pl.cdiv(num_items, workers_a_cta)
    num_ctas = min(config.num_ctas or num_ctas, num_ctas)
    num_workers = num_ctas * workers_a_cta
    rings = (2,) if pairing is Pairing.APART else ()
    persistent = num_items > num_workers
    dynamic = persistent and config.schedule == "dynamic" and not interpret
    kv_bytes = kv_len * (head_dim + v_head_dim) * 2
    # Heads are interleaved while their K and V stay in the L2 cache: all if all do, otherwise leaving room for what
    # passes. Warpgroups that work apart read K and V twice as often, and from further away if there is more of it;
    # but the long rows of one K/V head are too few to begin with.
    share, least = (16 << 20, 2) if pairing is Pairing.APART else (32 << 20, 1)
    most = config.head_group or max(least, share // kv_bytes) * (group // heads_a_tile or 1)
    if not config.head_group and batch_size * num_kv_heads * kv_bytes <= L2_BYTES:
        most = heads
    head_group = max(n for n in range(1, heads + 1) if heads % n == 0 and n <= most)

    # A step is one tile of keys: `parts` runs of `unit` keys; a listed block is `units_a_block` runs.
    # Tiles of several runs are for the plain rules: with more operands they spill.
    plain_rules = bias is None and num_kv_vectors == 0
    tile_kv = config.tile_kv if plain_rules else math.gcd(config.tile_kv, block_kv)
    unit = math.gcd(tile_kv, block_kv)
    parts, units_a_block = tile_kv // unit, block_kv // unit
    stages, q_stages = config.stages, config.q_stages
    # Whether a partial step is tested for keys that nothing of it can attend to.
    testable = plain_rules and (band != Band() or parts > 1 or kv_len % tile_kv != 0)
    separate_out = config.separate_out(head_dim, v_head_dim)
    # The first logits of the next tile are multiplied while the output of this one is written. Every tile then has a
    # step at least: one that attends nothing gets a step with no keys. Elsewhere it would spill.
    ahead = persistent and separate_out and plain_rules and sink_lse is None and head_dim == v_head_dim
    # Of a compute and of a memory thread. All together must not exceed what the CTA was launched with.
    if pairing is Pairing.APART:
        registers = 216, 40
    else:
        registers = (240, 24) if ahead else (232, 40)
    padded_q_len = num_rows * block_q
    # A TMA of 8-row swizzled tiles needs lengths of whole tiles (or less than one).
    q, k, v = (x if x.shape[1] < 8 else common.pad_to(x, 8, 1) for x in (q, k, v))

    # Optional operands, padded so that every read of a tile is in bounds and every row is legal for TMA.
    options: dict[str, jax.Array] = {}
    if q_segments is not None:
        options["q_segments"] = common.pad_to(q_segments, tile_rows)
        options["kv_segments"] = common.pad_to(kv_segments, tile_kv)
    if q_positions is not None or kv_positions is not None:
        if q_positions is None:
            q_positions = jnp.broadcast_to(jnp.arange(q_len, dtype=jnp.int32), (batch_size, q_len))
        if kv_positions is None:
            kv_positions = jnp.broadcast_to(jnp.arange(kv_len, dtype=jnp.int32), (batch_size, kv_len))
        options["q_positions"] = common.pad_to(q_positions, tile_rows)
        options["kv_positions"] = common.pad_to(kv_positions, tile_kv)
    if bias is not None:
        if bias.shape[2] > 1:
            bias = common.pad_to(bias, block_q, 2)
        if bias.shape[3] > 1:
            bias = common.pad_to(bias, block_kv, 3)
        options["bias"] = bias
    if sink_lse is not None:
        options["sink_lse"] = sink_lse.astype(jnp.float32)
    kv_vector_names = tuple(n for n in ("kv_segments", "kv_positions") if n in options)
    q_vector_names = tuple(n for n in ("q_segments", "q_positions") if n in options)

    # exp(x) = exp2(x * log2e), with the scale in the same multiplication where nothing comes between.
    plain_logits = bias is None and soft_cap is None and scale > 0
    to_log2 = scale * LOG2E if plain_logits else LOG2E

    # A row's sum is kept as one partial sum a thread and added up once an item, where registers allow and it measured
    # faster (not at 64, where it cost 7%).
    lane_sums = bias is None and v_head_dim == 128

    def kernel(*refs: Any) -> None:
        refs = list(refs)
        q_ref, k_ref, v_ref = refs[:3]
        list_refs = ListRefs(*refs[3:6], refs[6] if lists.order is not None else None)
        num_list_refs = 3 + (lists.order is not None)
        option_refs = dict(zip(options, refs[3 + num_list_refs :], strict=False))
        *counter_ref, out_ref, lse_ref, scratch, barriers = refs[3 + num_list_refs + len(options) :]
        q_smem, k_smem, v_smem, out_smem, lse_smem, kv_vectors, notes = scratch
        item_ready, item_free, ticket_ready, q_ready, q_free, k_ready, k_free, v_ready, v_free, tensor_core = barriers
        wg = lax.axis_index("wg")
        ring = lax.rem(wg, 2)
        worker = lax.axis_index("cta") * workers_a_cta + (ring if pairing is Pairing.APART else 0)

        def stage(ref: Any, slot: Any) -> Any:
            """A slot of this worker's ring of buffers or barriers."""
            return ref.at[ring, slot] if pairing is Pairing.APART else ref.at[slot]

        # What the memory warpgroup tells the others, in one buffer: two items, the runs of each stage, two tickets.
        def item_field(turn: Any, field: int) -> tuple[Any, ...]:
            return _at_ring(slot_of(turn, 2) * _PUBLISHED + field)

        def run_field(slot: Any, part: int) -> tuple[Any, ...]:
            return _at_ring(2 * _PUBLISHED + slot * parts + part)

        def ticket_field(turn: Any) -> tuple[Any, ...]:
            return _at_ring(2 * _PUBLISHED + stages * parts + slot_of(turn, 2))

        def _at_ring(index: Any) -> tuple[Any, ...]:
            return (ring, index) if pairing is Pairing.APART else (index,)

        def slot_of(count: Any, depth: int) -> Any:
            return count % depth if isinstance(count, int) else lax.rem(count, jnp.int32(depth))

        def query_slot(turn: Any, consumer: Any) -> Any:
            return slot_of(turn, q_stages) * compute_wgs + consumer

        def end_of_reads() -> None:
            # Interpreted, the tensor core's reads are plain ones; on hardware they are over when the product is.
            if interpret:
                plgpu.commit_smem()

        def release(barrier: Any) -> None:
            end_of_reads()
            plgpu.barrier_arrive(barrier)

        @pl.when(wg < compute_wgs)
        def compute_warpgroup() -> None:
            if pairing is not Pairing.ALONE:
                plgpu.set_max_registers(registers[0], action="increase")
            # Where this warpgroup's half of a tile begins.
            row_offset = wg * WG_ROWS if pairing is Pairing.ROWS else 0
            head_offset = wg if pairing is Pairing.HEADS else 0

            # The two warpgroups pass the tensor core to one another. A turn at it begins when both have said so: each
            # arrives once and waits once a turn. What a warpgroup does between the two holds up nobody.
            def yield_tensor_core() -> None:
                if take_turns:
                    plgpu.barrier_arrive(tensor_core)

            def await_tensor_core() -> None:
                if take_turns:
                    plgpu.barrier_wait(tensor_core)

            def read_item(turn: Any) -> tuple[Any, Any]:
                plgpu.barrier_wait(stage(item_ready, slot_of(turn, 2)))
                return notes[item_field(turn, _STEPS)], notes[item_field(turn, _FULL_STEPS)]

            def multiply_first(turn: Any, step0: Any, steps: Any, overlap: Any) -> Any:
                """A tile's first raw logits and the runs of keys they are of; past the last tile, anything."""
                q_slot, slot = query_slot(turn, wg), slot_of(step0, stages)

                @pl.when(steps > 0)
                def _operands() -> None:
                    plgpu.barrier_wait(q_ready.at[q_slot])
                    plgpu.barrier_wait(stage(k_ready, slot))

                logits = common.matmul(
                    q_smem.at[q_slot],
                    stage(k_smem, slot),
                    transpose_b=True,
                    interpret=bool(interpret),
                    overlap=overlap,
                )
                starts = tuple(notes[run_field(slot, part)] for part in range(parts))
                pl.when(steps > 0)(lambda: release(stage(k_free, slot)))
                return logits, starts

            def one_item(turn: Any, step0: Any, steps: Any, full_steps: Any, first: Any = None) -> Any:
                # Read where they are used: what is live during the loops costs registers.
                def field(which: int) -> Any:
                    return notes[item_field(turn, which)]

                def q_start() -> Any:
                    return pl.multiple_of(field(_Q_START), WG_ROWS) + row_offset

                q_slot = query_slot(turn, wg)
                q_tile = q_smem.at[q_slot]
                if not ahead:
                    plgpu.barrier_wait(q_ready.at[q_slot])

                q_vectors = {
                    name: plgpu.load(
                        option_refs[name].at[field(_BATCH), pl.ds(q_start(), WG_ROWS)],
                        layout=plgpu.Layout.WGMMA.reduce(1),
                        optimized=False,
                    )
                    for name in q_vector_names
                }

                if not ahead:

                    @pl.when(steps > 0)
                    def _first_keys() -> None:
                        plgpu.barrier_wait(stage(k_ready, slot_of(step0, stages)))

                def first_wait(step: Any) -> None:
                    # The turn of an item's first step was asked for at the end of the item before.
                    pl.when(step > 0)(yield_tensor_core)
                    await_tensor_core()

                def keys_of_next_step(step: Any) -> None:
                    @pl.when(step + 1 < steps)
                    def _wait() -> None:
                        plgpu.barrier_wait(stage(k_ready, slot_of(step0 + step + 1, stages)))

                def idle_step(step: Any) -> None:
                    slot = slot_of(step0 + step, stages)
                    first_wait(step)
                    plgpu.barrier_arrive(stage(k_free, slot))
                    yield_tensor_core()
                    plgpu.barrier_wait(stage(v_ready, slot))
                    await_tensor_core()
                    plgpu.barrier_arrive(stage(v_free, slot))
                    keys_of_next_step(step)

                def kv_step(step: Any, carry: Any, *, partial: bool, half: Any = None) -> Any:
                    """`half`: only that run of HALF keys of the tile."""
                    slot = slot_of(step0 + step, stages)
                    keys, values = stage(k_smem, slot), stage(v_smem, slot)
                    starts = None
                    if partial or bias is not None:
                        starts = tuple(notes[run_field(slot, part)] for part in range(parts))
                    if half is not None:
                        keys, values = (ref.at[pl.ds(half * HALF, HALF)] for ref in (keys, values))
                        if parts == 1:
                            starts = (starts[0] + half * HALF,)
                        else:
                            starts = (jnp.where(half == 0, starts[0], starts[1]),)

                    # QK
                    logits = common.matmul(
                        q_tile, keys, transpose_b=True, interpret=bool(interpret), overlap=lambda: first_wait(step)
                    )
                    vectors = dict(q_vectors)
                    if partial:
                        for name in kv_vector_names:
                            vectors[name] = common.col_vector(stage(kv_vectors[name], slot))
                    release(stage(k_free, slot))

                    logits = element_wise(logits, starts, vectors, partial=partial)
                    return accumulate(step, carry, logits, values)

                def element_wise(logits: Any, starts: Any, vectors: Any, *, partial: bool) -> Any:
                    shape = logits.shape
                    if not plain_logits:
                        logits = logits * jnp.float32(scale)
                    if bias is not None:
                        batch, head = field(_BATCH), field(_HEAD) + head_offset
                        logits = logits + _bias_tile(option_refs["bias"], batch, head, q_start(), starts[0], shape)
                    if soft_cap is not None:
                        logits = common.soft_cap_tanh(logits, soft_cap) * jnp.float32(soft_cap)
                    if partial:
                        mask = rule.tile(shape, q_axis=0, q_start=q_start(), kv_start=starts, **vectors)
                        if mask is not None:
                            logits = jnp.where(mask, logits, -jnp.inf)
                    return logits

                def accumulate(step: Any, carry: Any, logits: Any, values: Any) -> Any:
                    acc, m, total = carry
                    shape = logits.shape
                    slot = slot_of(step0 + step, stages)

                    # Softmax
                    m_new = jnp.maximum(m, logits.max(axis=1) * jnp.float32(to_log2))
                    alpha = jnp.exp2(m - m_new)
                    p = jnp.exp2(logits * jnp.float32(to_log2) - common.per_row(m_new, shape))
                    acc *= common.per_row(alpha, acc.shape)
                    total *= common.per_row(alpha, total.shape) if lane_sums else alpha
                    p16 = p.astype(dtype)
                    if lane_sums:
                        for column in range(0, shape[1], LANE_COLUMNS):
                            total += lax.slice(p, (0, column), (WG_ROWS, column + LANE_COLUMNS))
                    else:
                        total += p.sum(axis=1)
                    # All of it before the wait: what would slip behind it delays the product.
                    acc, total, m_new, p16 = lax.optimization_barrier((acc, total, m_new, p16))
                    yield_tensor_core()
                    plgpu.barrier_wait(stage(v_ready, slot))
                    await_tensor_core()

                    # PV
                    acc = common.matmul_add(
                        acc, p16, values, interpret=bool(interpret), overlap=lambda: keys_of_next_step(step)
                    )
                    release(stage(v_free, slot))
                    return acc, m_new, total

                def first_step(carry: Any) -> Any:
                    """With the logits that were multiplied ahead."""
                    logits, starts = first

                    def with_rule(_: Any, logits: Any) -> Any:
                        mask = rule.tile(
                            logits.shape, q_axis=0, q_start=q_start(), kv_start=starts, test_runs=True, **q_vectors
                        )
                        return jnp.where(mask, logits, -jnp.inf)

                    logits = element_wise(logits, None, {}, partial=False)
                    logits = lax.fori_loop(0, (full_steps == 0).astype(jnp.int32), with_rule, logits)
                    return accumulate(0, carry, logits, stage(v_smem, slot_of(step0, stages)))

                def partial_step(step: Any, carry: Any) -> Any:
                    if not testable:
                        return kv_step(step, carry, partial=True)
                    slot = slot_of(step0 + step, stages)
                    first_keys = [
                        notes[run_field(slot, 0)] + i * HALF if parts == 1 else notes[run_field(slot, i)]
                        for i in range(tile_kv // HALF)
                    ]
                    live = [rule.any_in_band(q_start(), WG_ROWS, key, HALF) & (key >= 0) for key in first_keys]

                    num_live = sum(x.astype(jnp.int32) for x in live)
                    pl.when(num_live == 0)(lambda: idle_step(step))
                    # Loops of one turn or none: as the branches of a switch they cost registers.
                    if len(live) == 2:
                        half = live[1].astype(jnp.int32)
                        carry = lax.fori_loop(
                            0,
                            (num_live == 1).astype(jnp.int32),
                            lambda _, c: kv_step(step, c, partial=True, half=half),
                            carry,
                        )
                    return lax.fori_loop(
                        0, lax.div(num_live, jnp.int32(len(live))), lambda _, c: kv_step(step, c, partial=True), carry
                    )

                def write(acc: Any, m: Any, total: Any) -> None:
                    batch, head, first_row = field(_BATCH), field(_HEAD) + head_offset, q_start()
                    plgpu.barrier_arrive(stage(item_free, slot_of(turn, 2)))
                    if sink_lse is not None:
                        sink_batch = batch if sink_lse.shape[0] > 1 else 0
                        sink = option_refs["sink_lse"][sink_batch, head] * jnp.float32(LOG2E)
                        sink = lax.broadcast_in_dim(sink, m.shape, [])
                        m_new = jnp.maximum(m, sink)
                        alpha = jnp.exp2(m - m_new)
                        acc *= common.per_row(alpha, acc.shape)
                        total = total * alpha + jnp.exp2(sink - m_new)
                        m = m_new
                    inverse = jnp.where(total == 0.0, 0.0, 1.0 / total)
                    acc *= common.per_row(inverse, acc.shape)
                    # The previous tile's store still reads the staging buffer. The wait also brings the four warps
                    # together: none may still multiply by the queries, where they are overwritten by the output.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    out_tile = out_smem.at[wg] if separate_out else q_tile
                    out_tile[...] = acc.astype(dtype)
                    lse_smem.at[wg][...] = jnp.where(total == 0.0, -jnp.inf, m * jnp.float32(LN2) + jnp.log(total))
                    plgpu.commit_smem()
                    rows = pl.ds(first_row, WG_ROWS)
                    plgpu.copy_smem_to_gmem(out_tile, out_ref.at[batch, rows, head], commit_group=False)
                    plgpu.copy_smem_to_gmem(lse_smem.at[wg], lse_ref.at[batch, head, rows], commit_group=False)
                    plgpu.commit_smem_to_gmem_group()
                    if not separate_out:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        plgpu.barrier_arrive(q_free.at[q_slot])

                carry = (
                    common.wgmma_full((WG_ROWS, v_head_dim), 0.0),
                    common.wgmma_full((WG_ROWS,), LOWEST),
                    common.wgmma_full((WG_ROWS, LANE_COLUMNS) if lane_sums else (WG_ROWS,), 0.0),
                )
                done = jnp.int32(0)
                if ahead:
                    carry, done = first_step(carry), jnp.int32(1)
                if full_is_exact:
                    carry = lax.fori_loop(done, full_steps, lambda i, c: kv_step(i, c, partial=False), carry)
                    done = lax.max(done, full_steps)
                acc, m, total = lax.fori_loop(done, steps, partial_step, carry)
                if lane_sums:
                    total = total.sum(axis=1)
                # The other warpgroup need not wait for this one's output.
                if ahead:
                    yield_tensor_core()
                else:
                    pl.when(steps > 0)(yield_tensor_core)
                if separate_out:
                    release(q_free.at[q_slot])
                if not ahead:
                    write(acc, m, total)
                    return None
                following = read_item(turn + 1)

                def meanwhile() -> None:
                    write(acc, m, total)
                    await_tensor_core()

                return *following, multiply_first(turn + 1, step0 + steps, following[0], meanwhile)

            def second_begins_a_turn_later() -> None:
                yield_tensor_core()
                await_tensor_core()

            pl.when(wg == 1)(second_begins_a_turn_later)
            yield_tensor_core()
            steps, full_steps = read_item(jnp.int32(0))
            if ahead:

                def one_turn_ahead(carry: Any) -> Any:
                    turn, step0, steps, full_steps, first = carry
                    return turn + 1, step0 + steps, *one_item(turn, step0, steps, full_steps, first)

                zero = jnp.int32(0)
                first = multiply_first(0, 0, steps, await_tensor_core)
                lax.while_loop(lambda c: c[2] >= 0, one_turn_ahead, (zero, zero, steps, full_steps, first))
            elif persistent:

                def one_turn(carry: Any) -> Any:
                    turn, step0, steps, full_steps = carry
                    one_item(turn, step0, steps, full_steps)
                    return turn + 1, step0 + steps, *read_item(turn + 1)

                lax.while_loop(lambda c: c[2] >= 0, one_turn, (jnp.int32(0), jnp.int32(0), steps, full_steps))
            else:

                @pl.loop(0, (steps >= 0).astype(jnp.int32))
                def _only(turn: Any) -> None:
                    one_item(turn, turn, steps, full_steps)

            if not ahead:
                await_tensor_core()

            @pl.when(wg == 0)
            def _last_turn() -> None:
                yield_tensor_core()
                await_tensor_core()

            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg >= compute_wgs)
        def memory_warpgroup() -> None:
            if pairing is not Pairing.ALONE:
                plgpu.set_max_registers(registers[1], action="decrease")
            capacity = jnp.int32(list_refs.indices.shape[-1])
            consumers = (ring,) if pairing is Pairing.APART else range(compute_wgs)

            def list_coords(batch: Any, head: Any) -> tuple[Any, Any]:
                return common.list_coords(lists, batch, head, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads)

            def place(number: Any) -> tuple[Any, Any, Any, Any]:
                """(batch, head, rank of the mask row, tile in it): sections of `head_group` heads, the longest rows
                of all of them first. Past the end: the last item, only ever read ahead.
                """
                number = lax.min(number, jnp.int32(num_items - 1))
                section, rest = _divmod(number, head_group * tiles_a_head)
                tile, head = _divmod(rest, head_group)
                batch, head = _divmod(section * head_group + head, head_tiles)
                rank, sub = _divmod(tile, subtiles)
                return batch, head * heads_a_tile, rank, sub

            def read_row(number: Any) -> Any:
                batch, head, rank, _ = place(number)
                return list_refs.ranked(*list_coords(batch, head), rank)

            def read_item(number: Any, row: Any) -> _Item:
                batch, head, _, sub = place(number)
                b, h = list_coords(batch, head)
                begin = lax.min(list_refs.row_ptr[b, h, row], capacity)
                entries = lax.min(list_refs.row_ptr[b, h, row + 1], capacity) - begin
                full = lax.min(list_refs.num_full[b, h, row], entries) if full_is_exact else jnp.int32(0)
                units = entries * units_a_block
                steps = lax.div(units + (parts - 1), jnp.int32(parts))
                return _Item(
                    batch=batch,
                    head=head,
                    q_start=row * block_q + sub * tile_rows,
                    begin=lax.min(begin, capacity - 1),  # a tile with no keys may begin past the last slot
                    units=units,
                    full_steps=lax.div(full * units_a_block, jnp.int32(parts)),
                    steps=jnp.where(number < num_items, lax.max(steps, jnp.int32(1)) if ahead else steps, -1),
                )

            def publish(turn: Any, item: _Item) -> None:
                slot = slot_of(turn, 2)

                @pl.when(turn >= 2)
                def _free() -> None:
                    plgpu.barrier_wait(stage(item_free, slot))

                for which, value in enumerate(item[:_PUBLISHED]):
                    notes[item_field(turn, which)] = value
                plgpu.barrier_arrive(stage(item_ready, slot))

            # Global memory takes its time, so everything is read ahead: while an item is loaded, the next one's row and
            # extent are read, and the number of the one after it is asked for early and read late.
            def dealt(turn: Any) -> Any:
                # Odd turns run backwards: with rows sorted by length, every worker gets long and short ones alike.
                return turn * num_workers + jnp.where(lax.rem(turn, 2) == 0, worker, num_workers - 1 - worker)

            def ask_after_next() -> Any:
                return common.take_ticket(counter_ref[0]) if dynamic else None

            def read_after_next(turn: Any, ticket: Any) -> Any:
                if not dynamic:
                    return dealt(turn + 2)
                *at_ring, index = ticket_field(turn)
                common.tell_ticket(ticket, notes.at[(*at_ring, pl.ds(index, 1))])
                plgpu.barrier_arrive(stage(ticket_ready, 0))
                plgpu.barrier_wait(stage(ticket_ready, 0))
                return notes[ticket_field(turn)] + 2 * num_workers

            def load_queries(turn: Any, item: _Item, consumer: Any) -> None:
                slot = query_slot(turn, consumer)

                @pl.when(turn >= q_stages)
                def _free() -> None:
                    plgpu.barrier_wait(q_free.at[slot])

                row = pl.multiple_of(item.q_start, WG_ROWS) + (consumer * WG_ROWS if pairing is Pairing.ROWS else 0)
                head = item.head + (consumer if pairing is Pairing.HEADS else 0)
                src = q_ref.at[item.batch, pl.ds(row, WG_ROWS), head]
                plgpu.copy_gmem_to_smem(src, q_smem.at[slot], q_ready.at[slot])

            def load_item(turn: Any, step0: Any, item: _Item, next_number: Any = None) -> tuple[_Item, Any] | None:
                """Returns the next item and the number of the one after it, where there may be any."""
                kv_head = lax.div(item.head, jnp.int32(group))
                b, h = list_coords(item.batch, item.head)

                def run_start(step: Any, part: int) -> Any:
                    """First key of a run; one past the end repeats the last."""
                    last_unit = lax.max(item.units, jnp.int32(1)) - 1 if ahead else item.units - 1
                    unit_index = lax.min(step * parts + part, last_unit) if parts > 1 else step
                    entry, sub = _divmod(unit_index, units_a_block)
                    return list_refs.indices[b, h, item.begin + entry] * block_kv + sub * unit

                def load_runs(src: Any, dst: Any, ready: Any, starts: Any) -> None:
                    for part, start in enumerate(starts):
                        dst_run = dst if parts == 1 else dst.at[pl.ds(part * unit, unit)]
                        plgpu.copy_gmem_to_smem(src.at[pl.ds(start, unit)], dst_run, ready)

                def load_keys(step: Any, starts: Any) -> None:
                    slot = slot_of(step0 + step, stages)

                    @pl.when(step0 + step >= stages)
                    def _free() -> None:
                        plgpu.barrier_wait(stage(k_free, slot))

                    for part, start in enumerate(starts):
                        exists = step * parts + part < item.units
                        notes[run_field(slot, part)] = jnp.where(exists, start, MISSING) if part or ahead else start
                    ready = stage(k_ready, slot)
                    load_runs(k_ref.at[item.batch, :, kv_head], stage(k_smem, slot), ready, starts)
                    for name in kv_vector_names:
                        load_runs(option_refs[name].at[item.batch], stage(kv_vectors[name], slot), ready, starts)

                def load_values(step: Any, starts: Any) -> None:
                    slot = slot_of(step0 + step, stages)

                    @pl.when(step0 + step >= stages)
                    def _free() -> None:
                        plgpu.barrier_wait(stage(v_free, slot))

                    load_runs(v_ref.at[item.batch, :, kv_head], stage(v_smem, slot), stage(v_ready, slot), starts)

                def load_step(step: Any) -> None:
                    starts = [run_start(step, part) for part in range(parts)]
                    load_keys(step, starts)
                    load_values(step, starts)

                if persistent:
                    ticket = ask_after_next()
                    next_row = read_row(next_number)
                for consumer in consumers:
                    load_queries(turn, item, consumer)
                if not persistent:
                    pl.loop(0, item.steps)(load_step)
                    return None

                last = item.steps - 1
                pl.loop(0, last)(load_step)
                starts = [run_start(lax.max(last, jnp.int32(0)), part) for part in range(parts)]
                pl.when(last >= 0)(lambda: load_keys(last, starts))
                following = read_item(next_number, next_row)
                pl.when(last >= 0)(lambda: load_values(last, starts))
                return following, read_after_next(turn, ticket)

            item = read_item(worker, read_row(worker))
            publish(jnp.int32(0), item)
            turns, steps = jnp.int32(0), jnp.int32(0)
            if persistent:

                def one_turn(carry: Any) -> Any:
                    turn, step0, item, next_number = carry
                    following, after_next = load_item(turn, step0, item, next_number)
                    publish(turn + 1, following)
                    return turn + 1, step0 + item.steps, following, after_next

                carry = (turns, steps, item, dealt(jnp.int32(1)))
                turns, steps, *_ = lax.while_loop(lambda c: c[2].steps >= 0, one_turn, carry)
            else:

                @pl.loop(0, (item.steps >= 0).astype(jnp.int32))
                def _only(turn: Any) -> None:
                    load_item(turn, turn, item)

                turns, steps = (item.steps >= 0).astype(jnp.int32), lax.max(item.steps, jnp.int32(0))

            # Leave no phase of a barrier unobserved.
            def drain(use: Any, barrier: Any) -> None:
                pl.when(use >= 0)(lambda: plgpu.barrier_wait(barrier))

            drain(turns - 1, stage(item_free, slot_of(turns - 1, 2)))
            for use in (turns - 1 - i for i in range(q_stages)):
                for consumer in consumers:
                    drain(use, q_free.at[query_slot(use, consumer)])
            for use in (steps - 1 - i for i in range(stages)):
                drain(use, stage(k_free, slot_of(use, stages)))
                drain(use, stage(v_free, slot_of(use, stages)))

    def entry(*refs: Any) -> None:
        pl.run_scoped(
            lambda scratch, barriers: kernel(*refs, scratch, barriers),
            (
                common.swizzled((q_stages * compute_wgs, WG_ROWS, head_dim), dtype),
                common.swizzled((*rings, stages, tile_kv, head_dim), dtype),
                common.swizzled((*rings, stages, tile_kv, v_head_dim), dtype),
                common.swizzled((compute_wgs, WG_ROWS, v_head_dim), dtype) if separate_out else None,
                plgpu.SMEM((compute_wgs, WG_ROWS), jnp.float32),
                {name: plgpu.SMEM((*rings, stages, tile_kv), jnp.int32) for name in kv_vector_names},
                plgpu.SMEM((*rings, 2 * _PUBLISHED + stages * parts + 2), jnp.int32),
            ),
            (
                plgpu.Barrier(num_barriers=(*rings, 2)),
                plgpu.Barrier(num_arrivals=compute_wgs // workers_a_cta, num_barriers=(*rings, 2)),
                plgpu.Barrier(num_barriers=(*rings, 1)),
                plgpu.Barrier(num_barriers=q_stages * compute_wgs),
                plgpu.Barrier(num_barriers=q_stages * compute_wgs),
                plgpu.Barrier(num_arrivals=parts * (1 + len(kv_vector_names)), num_barriers=(*rings, stages)),
                plgpu.Barrier(num_arrivals=compute_wgs // workers_a_cta, num_barriers=(*rings, stages)),
                plgpu.Barrier(num_arrivals=parts, num_barriers=(*rings, stages)),
                plgpu.Barrier(num_arrivals=compute_wgs // workers_a_cta, num_barriers=(*rings, stages)),
                plgpu.Barrier(num_arrivals=2),
            ),
            collective_axes="wg",
        )

    list_operands = [lists.indices, lists.row_ptr, lists.num_full]
    if lists.order is not None:
        list_operands.append(lists.order)
    counter = [jax.new_ref(jnp.zeros((1,), jnp.int32))] if dynamic else []
    out, lse = plgpu.kernel(
        entry,
        out_type=(
            jax.ShapeDtypeStruct((*q.shape[:3], v_head_dim), dtype),
            jax.ShapeDtypeStruct((batch_size, num_q_heads, padded_q_len), jnp.float32),
        ),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=compute_wgs + workers_a_cta,
        thread_name="wg",
        # Row reductions stay inside a warp: the scratch for reductions across warps is not needed.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret or None,
    )(q, k, v, *list_operands, *options.values(), *counter)
    return out[:, :q_len], lse[:, :, :q_len]


class _Item(NamedTuple):
    """A query tile: where it is, and its run of the block lists. `steps` is -1 past the last item."""

    steps: Any
    full_steps: Any
    batch: Any
    head: Any
    q_start: Any
    begin: Any
    units: Any


# The fields that the compute warpgroups are told.
_PUBLISHED = 5
_STEPS, _FULL_STEPS, _BATCH, _HEAD, _Q_START = range(_PUBLISHED)


def _divmod(x: Any, n: int) -> tuple[Any, Any]:
    if n == 1:
        return x, jnp.int32(0)
    return lax.div(x, jnp.int32(n)), lax.rem(x, jnp.int32(n))


def _bias_tile(ref: Any, batch: Any, head: Any, q_start: Any, kv_start: Any, shape: tuple[int, int]) -> jax.Array:
    batches, heads, rows, columns = ref.shape
    tile = ref.at[batch if batches > 1 else 0, head if heads > 1 else 0]
    if rows > 1 and columns > 1:
        tile = tile.at[pl.ds(q_start, shape[0]), pl.ds(kv_start, shape[1])]
        return plgpu.load(tile, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
    if columns > 1:
        tile = plgpu.load(tile.at[0, pl.ds(kv_start, shape[1])], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        return common.per_col(tile.astype(jnp.float32), shape)
    if rows > 1:
        tile = plgpu.load(tile.at[pl.ds(q_start, shape[0]), 0], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        return common.per_row(tile.astype(jnp.float32), shape)
    return lax.broadcast_in_dim(tile[0, 0].astype(jnp.float32), shape, [])
