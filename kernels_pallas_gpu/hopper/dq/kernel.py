"""The dQ kernel for Hopper: queries and dO stay, keys and values are streamed by the row lists."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backend.contract import Call
from xsake.backend.delta import DeltaParts
from xsake.kernels_pallas_gpu.hopper.tile.backward import (
    ALONG_COLS,
    ALONG_ROWS,
    PART,
    ROWS,
    WGMMA,
    LogitRule,
    Streamed,
    WorkGrid,
    drain,
    int_vectors,
    load_bias,
    load_rows,
    mma,
    opaque,
    pad,
    pad_bias,
    read,
    release,
    run_kernel,
    run_where,
    vectors,
    with_values,
    with_zeros,
)
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import BackwardConfig
from xsake.kernels_pallas_gpu.hopper.tile.bits import Bits, TileBits
from xsake.kernels_pallas_gpu.hopper.tile.common import ListRefs, RowLists, list_coords, pad_to, swizzled, wgmma_full
from xsake.kernels_pallas_gpu.hopper.tile.conditions import when
from xsake.kernels_pallas_gpu.hopper.tile.element_rule import ElementRule
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing
from xsake.kernels_pallas_gpu.hopper.tile.turns import Turns

Array = jax.Array
# Fields of an item: the pair, and for every ring the first resident row (below 0: there is none), the first list entry,
# tiles of full blocks, and tiles of all blocks.
PAIR, START, BEGIN, FULL, TILES = range(5)
FIELDS_OF_RING = 4


def dq(
    call: Call,
    lse: Array,
    minus_delta: Array | DeltaParts,
    d_out: Array,
    *,
    config: BackwardConfig,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """dQ [B, T, H, D] and -delta [B, H, T].

    Of `DeltaParts`, for whole blocks that are not packed, the kernel sums delta: it has dO in shared memory anyway.
    """
    mask, bias = call.mask, call.bias
    block_q, block_kv = mask.block_q, mask.block_kv
    batch, q_len, q_heads, d = call.query.shape
    _, kv_len, kv_heads, dv_dim = call.value.shape
    lists = RowLists(mask.kv_indices, mask.kv_row_ptr, mask.kv_num_full, mask.row_order)
    bits = Bits.of(mask.bitmaps, mask.kv_bitmap)
    packing = Packing.required(block_q, lists, q_heads, kv_heads, bias)
    q_heads //= packing.group
    group = q_heads // kv_heads
    dtype = call.query.dtype
    k, v = (pad_to(x, 8, 1) for x in (call.key, call.value))  # TMA copies tiles of 8 rows
    q, d_out = (pad_to(x, packing.whole, 1) for x in (call.query, d_out))
    tile, wgs = config.tile, config.compute_wgs
    if block_kv % tile:
        raise ValueError(f"{block_kv=} must be a multiple of {config.tile=}")
    ragged = kv_len % block_kv != 0  # a tile of the last block may lie wholly past the end
    elements = ElementRule(band=call.band, kv_len=kv_len if ragged else None, q_axis=0)
    rule = LogitRule(scale=call.scale, soft_cap=call.soft_cap, has_bias=bias is not None)
    # The heads of a group follow one another and find the K and V that they share in the L2 cache.
    work = WorkGrid.make(
        batch * q_heads, packing.length(q_len), packing.rows, wgs, kv_len * (d + dv_dim) * 2 // group or 1
    )
    simulate = bool(interpret)
    q_size = pl.cdiv(q_len, block_q) * block_q
    kv_size = pl.cdiv(kv_len, block_kv) * block_kv
    statistic = packing.of_heads(pad(rule.row_statistic(lse), 2, q_size))
    parts = minus_delta if isinstance(minus_delta, DeltaParts) else None
    skips = elements.by_position and call.kv_positions is None
    by_index = ragged or skips
    # Most tiles of a list lie wholly before the queries: their elements need no test beside the bits.
    bits_alone = bits is not None and skips and not ragged and call.kv_segments is None
    q_vectors = vectors(q_size, position=call.q_positions if elements.by_position else None, segment=call.q_segments)
    q_vectors = {name: packing.of_tokens(x) for name, x in q_vectors.items()}
    kv_vectors = vectors(
        kv_size,
        position=call.kv_positions if elements.by_position else None,
        segment=call.kv_segments,
        index=jnp.arange(kv_size, dtype=jnp.int32)[None] if by_index else None,
    )

    # A packed tile takes many copies, for which the memory warpgroup has too few registers.
    if packing.group > 1 and config.resident_stages == 2:
        raise ValueError(f"{block_q=} is packed: it needs resident_stages=1, got {config}")
    ahead = packing.group == 1 and config.loads_ahead("dq", packing.rows, d, dv_dim, len(kv_vectors))
    num_fields = 1 + FIELDS_OF_RING * work.rings
    turns = Turns(items=work.items, fields=num_fields, ahead=ahead, compute_wgs=wgs, interpret=simulate)

    def kernel(
        q_ref,
        k_ref,
        v_ref,
        do_ref,
        statistic_ref,
        delta_refs,
        q_vector_refs,
        kv_vector_refs,
        list_refs,
        bias_ref,
        bit_refs,
        counter_ref,
        dq_ref,
        sum_ref,
        q_smem,
        do_smem,
        k_smem,
        v_smem,
        kv_vector_buffer,
        simulated,
        resident,
        k_ready,
        v_ready,
        k_free,
        v_free,
        turn_refs,
    ):
        wg = lax.axis_index("wg")
        kv_vector_smem = {name: kv_vector_buffer.at[i] for i, name in enumerate(kv_vectors)}

        def batch_and_head(pair):
            return lax.div(pair, q_heads), lax.rem(pair, q_heads)

        def coords_of(pair):
            return list_coords(list_refs, *batch_and_head(pair), num_q_heads=q_heads, num_kv_heads=kv_heads)

        streamed = Streamed(lists=list_refs, full_is_exact=call.full_is_exact, block=block_kv, tile=tile)

        def load_residents(b, row, h, place):
            for ref, smem in ((q_ref, q_smem), (do_ref, do_smem)):
                packing.load(ref, b, row, h, smem.at[place], resident.at[place])

        def attend(item, done):
            """An item of a compute warpgroup; `done`, tiles of its earlier items; returns that with this one's."""
            ring = 0 if work.rings == 1 else wg

            def field(which):
                return item(which if which == PAIR else which + FIELDS_OF_RING * ring)

            b, h = batch_and_head(field(PAIR))
            coords = coords_of(field(PAIR))

            def first_row():
                start = pl.multiple_of(jnp.maximum(field(START), 0), ROWS)
                return start + wg * ROWS if work.rings == 1 else start

            q_start = first_row()
            rows, first_query = pl.ds(q_start, ROWS), packing.first_query(q_start)
            place = item.place * wgs + wg
            q_tile, do_tile = q_smem.at[place], do_smem.at[place]
            if not ahead:
                load_residents(b, q_start, h, place)
            statistic, minus_delta = [
                None if r is None else plgpu.load(r.at[b, h, rows], layout=ALONG_ROWS, optimized=False)
                for r in (statistic_ref, delta_refs.d_lse if parts else delta_refs)
            ]
            # Into registers, for shared memory has no room for it, and before the wait for Q and dO.
            out = plgpu.load(delta_refs.out.at[b, rows, h], layout=WGMMA, optimized=False) if parts else None
            q_rows = load_rows(q_vector_refs, b, rows)
            begin, full_tiles, tiles = field(BEGIN), field(FULL), field(TILES)

            def per_row(x, width):
                return lax.broadcast_in_dim(x, (ROWS, width), [0])

            buffers = [r.at[wg] for r in simulated]
            plgpu.barrier_wait(resident.at[place])
            if out is not None:
                products = out.astype(jnp.float32) * plgpu.load(do_tile, layout=WGMMA).astype(jnp.float32)
                weight = jnp.sum(products, axis=1)
                minus_delta = -weight if minus_delta is None else minus_delta - weight
                minus_delta = jnp.where(rule.attends_nothing(statistic), 0.0, minus_delta)

                @when(field(START) >= 0)
                def _keep():
                    sum_ref[b, h, rows] = minus_delta

            if ahead:
                item.leave_the_last()

            def bitmap_of(n):
                return None if bits is None else bit_refs.of_slot(coords, begin + lax.div(n - done, streamed.per_block))

            def element_mask(slot, keys, n, part, own_bits, ruled):
                kv_first = lax.rem(n - done, streamed.per_block) * tile + part * PART
                if not ruled:
                    return own_bits.tile(None, 0, kv_first, (ROWS, PART), 0)
                kv = {name: plgpu.load(r.at[ring, slot, keys], layout=ALONG_COLS) for name, r in kv_vector_smem.items()}
                row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ALONG_ROWS)
                ok = elements.attends(
                    (ROWS, PART),
                    q_rows.get("position", packing.query(row) + first_query),
                    kv.get("position", kv.get("index")),
                    q_segment=q_rows.get("segment"),
                    kv_segment=kv.get("segment"),
                    kv_index=kv.get("index"),
                )
                return ok if own_bits is None else own_bits.tile(ok, 0, kv_first, (ROWS, PART), 0)

            def accumulate(dq_acc):
                def step(n, bitmap, *, masked):
                    following = bitmap_of(n + 1) if masked else None  # read long before it is needed
                    own_bits = None
                    if bits is not None and masked:
                        own_bits = TileBits(bit_refs, coords, bitmap, lax.rem(q_start, packing.rows), packing)
                    slot, inner = lax.rem(n, config.stages), lax.rem(n, config.inner_stages)
                    tile_start = 0 if bias is None else streamed.start(coords, begin, n - done)
                    plgpu.barrier_wait(k_ready.at[ring, slot])
                    if masked or config.inner_stages > 1:
                        plgpu.barrier_wait(v_ready.at[ring, inner])

                    def products(s_acc, dp_acc, *, part, width, ruled):
                        keys, start = pl.ds(part * width, width), tile_start + part * width
                        k_tile, v_tile = k_smem.at[ring, slot, keys], v_smem.at[ring, inner, keys]
                        # S and dP
                        own = opaque(place, interpret=simulate)
                        mma(s_acc, q_smem.at[own], k_tile, transpose_b=True, interpret=simulate)
                        if config.inner_stages == 1 and not masked and part == 0:
                            plgpu.barrier_wait(v_ready.at[ring, inner])
                        mma(dp_acc, do_smem.at[own], v_tile, transpose_b=True, interpret=simulate)
                        s = read(s_acc, in_flight=1, interpret=simulate)
                        # P, while dP is computed
                        _, weight = rule.probabilities(
                            s,
                            None if rule.folds_lse else per_row(statistic, width),
                            None if bias is None else load_bias(bias_ref, b, h, q_start, start, (ROWS, width)),
                            element_mask(slot, keys, n, part, own_bits, ruled) if masked else None,
                        )
                        # dS
                        dp = read(dp_acc, in_flight=0, interpret=simulate)
                        if not masked and (part + 1) * width == tile:
                            release(v_free.at[ring, inner], interpret=simulate)
                        # dQ
                        mma(dq_acc, (weight * dp).astype(dtype), k_tile, interpret=simulate)

                    width = PART if masked or not rule.folds_lse else tile

                    def part_step(part, _=None):
                        def run(ruled=True):
                            with_values(
                                functools.partial(products, part=part, width=width, ruled=ruled),
                                [r.at[:, pl.ds(0, width)] for r in buffers[1:]],
                                [
                                    per_row(statistic, width) if rule.folds_lse else wgmma_full((ROWS, width), 0.0),
                                    per_row(minus_delta, width),
                                ],
                                interpret=simulate,
                            )

                        near, live = None, None if own_bits is None else own_bits.any(0)
                        if skips and masked:
                            first_key = kv_vector_smem["index"][ring, slot, part * width]
                            place = first_query, packing.queries, first_key, width
                            near = elements.may_attend(*place)
                            if bits_alone:
                                whole = elements.all_attend(*place)
                                run_where(functools.partial(run, ruled=False), whole, live)
                                near &= ~whole
                        run_where(run, near, live)

                    if masked:
                        # A loop in the kernel: every copy of the code takes time to compile.
                        lax.fori_loop(0, tile // width, part_step, None)
                        release(v_free.at[ring, inner], interpret=simulate)
                    else:
                        for part in range(tile // width):
                            part_step(part)
                    release(k_free.at[ring, slot], interpret=simulate)
                    return following

                lax.fori_loop(done, done + full_tiles, functools.partial(step, masked=False), None)
                last, bitmap = done + tiles, bitmap_of(done + full_tiles)
                lax.fori_loop(done + full_tiles, last, functools.partial(step, masked=True), bitmap)
                return read(dq_acc, in_flight=0, interpret=simulate)

            grad = with_zeros(accumulate, buffers[:1], [(ROWS, d)], interpret=simulate)
            q_tile[...] = (grad * call.scale).astype(dtype)
            plgpu.commit_smem()

            @when(field(START) >= 0)
            def _store():
                b, h = batch_and_head(field(PAIR))
                packing.store(q_tile, dq_ref, b, first_row(), h)

            return done + field(TILES)

        @when(wg < wgs)
        def _compute_warpgroup():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            turns.take(turn_refs, attend, jnp.int32(0))

        def load_item(turn, number, done):
            """An item of the memory warpgroup; `done`, tiles of every ring's earlier items."""
            pair, rank, _ = work.columns.place(number)
            b, h = batch_and_head(pair)
            kv_head, coords = lax.div(h, group), coords_of(pair)
            spans, fields = [], [pair]
            for ring in range(work.rings):
                start, block, exists = work.place(list_refs, coords, rank, ring)
                begin, full, tiles = streamed.span(coords, block, exists)
                spans.append((begin, tiles))
                fields += [start, begin, full, tiles]
            turns.publish(turn_refs, turn, fields)
            for reader in range(wgs):
                start = fields[START + FIELDS_OF_RING * (reader if work.rings > 1 else 0)]
                row = pl.multiple_of(jnp.maximum(start, 0), ROWS) + (reader * ROWS if work.rings == 1 else 0)
                if ahead:
                    load_residents(b, row, h, lax.rem(turn, 2) * wgs + reader)
                if parts and not simulate:
                    plgpu.async_prefetch(delta_refs.out.at[b, pl.ds(row, ROWS), h])

            @pl.loop(0, functools.reduce(jnp.maximum, [tiles for _, tiles in spans]))
            def _fetch(t):
                for ring, (before, (begin, tiles)) in enumerate(zip(done, spans, strict=True)):

                    @when(t < tiles)
                    def _(ring=ring, begin=begin, n=before + t):
                        slot, inner = lax.rem(n, config.stages), lax.rem(n, config.inner_stages)
                        keys = pl.ds(streamed.start(coords, begin, t), tile)

                        @when(n >= config.stages)
                        def _():
                            plgpu.barrier_wait(k_free.at[ring, slot])

                        plgpu.copy_gmem_to_smem(
                            k_ref.at[b, keys, kv_head], k_smem.at[ring, slot], k_ready.at[ring, slot]
                        )
                        for name, x_ref in kv_vector_refs.items():
                            x = x_ref.at[0 if x_ref.shape[0] == 1 else b, keys]
                            plgpu.copy_gmem_to_smem(x, kv_vector_smem[name].at[ring, slot], k_ready.at[ring, slot])

                        @when(n >= config.inner_stages)
                        def _():
                            plgpu.barrier_wait(v_free.at[ring, inner])

                        plgpu.copy_gmem_to_smem(
                            v_ref.at[b, keys, kv_head], v_smem.at[ring, inner], v_ready.at[ring, inner]
                        )

            return tuple(before + tiles for before, (_, tiles) in zip(done, spans, strict=True))

        @when(wg == wgs)
        def _memory_warpgroup():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            done = turns.deal(turn_refs, counter_ref, load_item, (jnp.int32(0),) * work.rings)
            for ring, tiles in enumerate(done if simulate else []):
                drain(k_free, config.stages, tiles, (ring,))
                drain(v_free, config.inner_stages, tiles, (ring,))

    outer, inner = (work.rings, config.stages), (work.rings, config.inner_stages)
    arrivals = wgs // work.rings
    grad, sums = run_kernel(
        kernel,
        "block_sparse_dq",
        turns.ctas,
        wgs,
        (jax.ShapeDtypeStruct(q.shape, dtype), None if parts is None else jax.ShapeDtypeStruct(lse.shape, jnp.float32)),
        [
            q,
            k,
            v,
            d_out,
            statistic,
            packing.of_heads(pad(minus_delta, 2, q_size)) if parts is None else parts,
            q_vectors,
            kv_vectors,
            ListRefs(*lists),
            None if bias is None else pad_bias(bias, q_size, kv_size),
            bits,
            turns.counter(),
        ],
        [
            swizzled(((1 + ahead) * wgs, ROWS, d), dtype),
            swizzled(((1 + ahead) * wgs, ROWS, dv_dim), dtype),
            swizzled((*outer, tile, d), dtype),
            swizzled((*inner, tile, dv_dim), dtype),
            int_vectors(len(kv_vectors), outer, tile),
            [plgpu.SMEM((wgs, *s), jnp.float32) for s in ((ROWS, d), (ROWS, tile), (ROWS, tile)) if simulate],
            plgpu.Barrier(num_arrivals=2 * packing.pieces(ROWS), num_barriers=(1 + ahead) * wgs),
            plgpu.Barrier(num_arrivals=1 + len(kv_vectors), num_barriers=outer),
            plgpu.Barrier(num_barriers=inner),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=outer),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=inner),
            turns.scratch(),
        ],
        interpret,
    )
    return grad[:, :q_len], minus_delta if parts is None else sums
