"""The dK/dV kernel for Hopper: keys and values stay, queries and dO are streamed by the transposed lists.

The query heads of a group are streamed one after the other, so that their sum needs no atomics.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake._backend import Call
from xsake.kernels_pallas_gpu.mosaic_backward_common import (
    ALONG_COLS,
    ALONG_ROWS,
    PART,
    ROWS,
    WGMMA,
    LogitRule,
    Streamed,
    WorkGrid,
    drain,
    early_ranks,
    int_vectors,
    load_bias,
    load_rows,
    mma,
    opaque,
    over_columns,
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
from xsake.kernels_pallas_gpu.mosaic_backward_config import BackwardConfig
from xsake.kernels_pallas_gpu.mosaic_bits import Bits, TileBits
from xsake.kernels_pallas_gpu.mosaic_common import ListRefs, RowLists, list_coords, pad_to, swizzled, wgmma_full
from xsake.kernels_pallas_gpu.mosaic_packing import Packing
from xsake.kernels_pallas_gpu.mosaic_turns import Turns

Array = jax.Array
# Fields of an item: the pair, and for every ring the first resident key (below 0: there is none) and the mask column.
PAIR, START, COLUMN = range(3)
FIELDS_OF_RING = 2


def dkv(
    call: Call, lse: Array, minus_delta: Array, d_out: Array, *, config: BackwardConfig, interpret: Any = False
) -> tuple[Array, Array]:
    """dK [B, S, K, D] and dV [B, S, K, Dv]."""
    mask, bias = call.mask, call.bias
    block_q, block_kv = mask.block_q, mask.block_kv
    batch, q_len, q_heads, d = call.query.shape
    _, kv_len, kv_heads, dv_dim = call.value.shape
    lists = RowLists(mask.q_indices, mask.q_row_ptr, mask.q_num_full, mask.col_order)
    bits = Bits.of(mask.bitmaps, mask.q_bitmap)
    packing = Packing.required(block_q, lists, q_heads, kv_heads, bias)
    q_heads //= packing.group
    pairs, group = batch * kv_heads, q_heads // kv_heads
    k, v = (pad_to(x, 8, 1) for x in (call.key, call.value))  # TMA copies tiles of 8 rows
    q, d_out = (pad_to(x, packing.whole, 1) for x in (call.query, d_out))
    dtype, tile, wgs = q.dtype, config.tile, config.compute_wgs
    if packing.rows % tile:
        raise ValueError(f"{block_q=}, {packing.rows} rows, must be a multiple of {config.tile=}")
    rule = LogitRule(
        scale=call.scale,
        band=call.band,
        soft_cap=call.soft_cap,
        has_bias=bias is not None,
        rows_share_bias=bias is not None and bias.shape[2] == 1 and q_len % block_q != 0,
    )
    # Where the accumulators of dK and dV do not fit in the registers of one warpgroup, two warpgroups share 64 keys.
    # The first computes P and dV, the second dP and dK; P goes from the first to the second through shared memory.
    split = config.splits(d, dv_dim)
    if split and (wgs != 2 or tile != ROWS or config.resident_stages == 2):
        needs = f"compute_wgs=2, tile={ROWS} and resident_stages=1"
        raise ValueError(f"head dims {d} and {dv_dim} need {needs}, got {config}")
    tile_wgs = 1 if split else wgs  # warpgroups that hold keys of their own
    streamed_bytes = packing.group * group * q_len * (d + dv_dim) * 2
    work = WorkGrid.make(pairs, kv_len, block_kv, tile_wgs, streamed_bytes, early=early_ranks(pairs))
    simulate = bool(interpret)
    # Whether full and masked tiles share their code, because every copy takes time to compile.
    tests = rule.by_position or call.q_segments is not None
    one_copy = tests and rule.folds_lse and bits is None and tile == PART and not split

    q_size, kv_size = pl.cdiv(q_len, block_q) * block_q, pl.cdiv(kv_len, block_kv) * block_kv
    # Queries past the end are padded as empty rows, whose p is 0. The store drops keys past the end.
    statistic = packing.of_heads(pad(rule.row_statistic(lse), 2, q_size, -jnp.inf if rule.folds_lse else jnp.inf))
    minus_delta = packing.of_heads(pad(minus_delta, 2, q_size))
    skips = rule.by_position and call.q_positions is None
    q_vectors = vectors(
        q_size,
        position=call.q_positions if rule.by_position else None,
        segment=call.q_segments,
        index=jnp.arange(q_size, dtype=jnp.int32)[None] if skips else None,
    )
    q_vectors = {name: packing.of_tokens(x) for name, x in q_vectors.items()}
    kv_vectors = vectors(kv_size, position=call.kv_positions if rule.by_position else None, segment=call.kv_segments)

    ahead = config.loads_ahead("dkv", block_kv, d, dv_dim, len(q_vectors))
    fields = 1 + FIELDS_OF_RING * work.rings
    turns = Turns(items=work.items, fields=fields, ahead=ahead, compute_wgs=wgs, interpret=simulate)

    def kernel(
        tensors,
        statistics,
        q_vector_refs,
        kv_vector_refs,
        list_refs,
        interleaved_ref,
        bias_ref,
        bit_refs,
        counter_ref,
        dk_ref,
        dv_ref,
        resident_smem,
        q_ring,
        do_ring,
        q_vector_buffer,
        simulated,
        resident,
        ring_barriers,
        handed_over,
        turn_refs,
    ):
        q_ref, k_ref, v_ref, do_ref = tensors
        (statistic_ref, delta_ref), (k_smem, v_smem) = statistics, resident_smem
        (q_smem, statistic_smem), (do_smem, delta_smem) = q_ring, do_ring
        q_ready, do_ready, q_free, do_free = ring_barriers
        p_smem, p_ready, p_free, finished = handed_over
        q_vector_smem = {name: q_vector_buffer.at[i] for i, name in enumerate(q_vectors)}
        wg = lax.axis_index("wg")
        streamed = Streamed(lists=list_refs, full_is_exact=call.full_is_exact, block=packing.rows, tile=tile)

        def coords_of(pair):
            b, kv_head = lax.div(pair, kv_heads), lax.rem(pair, kv_heads)
            return lambda g: list_coords(list_refs, b, kv_head * group + g, num_q_heads=q_heads, num_kv_heads=kv_heads)

        ring = 0 if work.rings == 1 else wg

        def resident_keys(item):
            """(batch, K/V head, index of the first key, whether there are keys) of a compute warpgroup's item."""
            start = item(START + FIELDS_OF_RING * ring)
            first = pl.multiple_of(jnp.maximum(start, 0), ROWS) + (0 if split or work.rings > 1 else wg * ROWS)
            return lax.div(item(PAIR), kv_heads), lax.rem(item(PAIR), kv_heads), first, start >= 0

        def load_residents(b, kv_start, kv_head, place):
            rows = pl.ds(kv_start, ROWS)
            for ref, smem in ((k_ref, k_smem), (v_ref, v_smem)):
                plgpu.copy_gmem_to_smem(ref.at[b, rows, kv_head], smem.at[place], resident.at[place])

        def element_mask(slot, queries, kv_start, kv_rows, own_bits, part):
            q = {name: plgpu.load(r.at[ring, slot, queries], layout=ALONG_COLS) for name, r in q_vector_smem.items()}
            kv_index = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ALONG_ROWS) + kv_start
            ok = rule.attends(
                (ROWS, PART),
                1,
                q.get("position", q.get("index")),
                kv_rows.get("position", kv_index),
                q.get("segment"),
                kv_rows.get("segment"),
                None,
            )
            kv_first = lax.rem(kv_start, block_kv)
            return ok if own_bits is None else own_bits.tile(ok, part * PART, kv_first, (ROWS, PART), 1)

        def walk(item, done, step):
            """Calls `step(n, ...)` for each tile of an item, head after head, from n = `done` on; returns the end."""
            coords, column = coords_of(item(PAIR)), item(COLUMN + FIELDS_OF_RING * ring)
            exists = True if work.all_exist else item(START + FIELDS_OF_RING * ring) >= 0

            def head(g, n):
                begin, full_tiles, tiles = streamed.span(coords(g), column, exists)

                def bitmap_of(m):
                    slot = begin + lax.div(m - n, streamed.per_block)
                    return None if bits is None else bit_refs.of_slot(coords(g), slot)

                def masked_step(m, bitmap):
                    following = bitmap_of(m + 1)  # read long before it is needed
                    row = lax.rem(m - n, streamed.per_block) * tile
                    own = None if bits is None else TileBits(bit_refs, coords(g), bitmap, row, packing)
                    at(m, None, own_bits=own, masked=True)
                    return following

                h = lax.rem(item(PAIR), kv_heads) * group + g
                at = functools.partial(step, h=h, start_of=lambda m: streamed.start(coords(g), begin, m - n))
                if one_copy:
                    lax.fori_loop(n, n + tiles, lambda m, _: at(m, _, own_bits=None, masked=m >= n + full_tiles), None)
                    return n + tiles
                lax.fori_loop(n, n + full_tiles, functools.partial(at, own_bits=None, masked=False), None)
                lax.fori_loop(n + full_tiles, n + tiles, masked_step, bitmap_of(n + full_tiles))
                return n + tiles

            return head(0, done) if group == 1 else lax.fori_loop(0, group, head, done)

        # Each works on an item, and returns the tiles of all items until now; `done`: those of the items before.

        def keys_and_values(item, done):
            b, kv_head, kv_start, _ = resident_keys(item)
            rows = pl.ds(kv_start, ROWS)
            place = item.place * wgs + wg
            k_tile, v_tile = k_smem.at[place], v_smem.at[place]
            if not ahead:
                load_residents(b, kv_start, kv_head, place)
            kv_rows = load_rows(kv_vector_refs, b, rows)
            buffers = [r.at[wg] for r in simulated]
            plgpu.barrier_wait(resident.at[place])
            if ahead:
                item.leave_the_last()

            def accumulate(dk_acc, dv_acc):
                def step(n, _, *, h, start_of, own_bits, masked):
                    slot, inner = lax.rem(n, config.stages), lax.rem(n, config.inner_stages)
                    tile_start = 0 if bias is None else start_of(n)
                    plgpu.barrier_wait(q_ready.at[ring, slot])
                    plgpu.barrier_wait(do_ready.at[ring, inner])

                    def products(s_acc, dp_acc, *, part, width):
                        queries, start = pl.ds(part * width, width), tile_start + part * width
                        q_tile, do_tile = q_smem.at[ring, slot, queries], do_smem.at[ring, inner, queries]
                        # S and dP, transposed: keys by queries
                        own = opaque(place, interpret=simulate)
                        mma(s_acc, k_smem.at[own], q_tile, transpose_b=True, interpret=simulate)
                        mma(dp_acc, v_smem.at[own], do_tile, transpose_b=True, interpret=simulate)
                        s = read(s_acc, in_flight=1, interpret=simulate)
                        # P, while dP is computed
                        mask = functools.partial(element_mask, slot, queries, kv_start, kv_rows, own_bits, part)
                        if one_copy:
                            s = lax.fori_loop(
                                0, masked.astype(jnp.int32), lambda _, s: jnp.where(mask(), s, -jnp.inf), s
                            )
                        p, weight = rule.probabilities(
                            s,
                            None if rule.folds_lse else over_columns(statistic_smem.at[ring, slot, queries]),
                            None if bias is None else load_bias(bias_ref, b, h, kv_start, start, (ROWS, width)),
                            None if one_copy or not masked else mask(),
                        )
                        # dV, while dS is computed
                        mma(dv_acc, p.astype(dtype), do_tile, interpret=simulate)
                        ds = weight * read(dp_acc, in_flight=1, interpret=simulate)
                        # dK
                        mma(dk_acc, ds.astype(dtype), q_tile, interpret=simulate)
                        if one_copy or (not masked and (part + 1) * width == tile):
                            if not simulate:
                                plgpu.wgmma_wait(1)
                            release(do_free.at[ring, inner], interpret=simulate)

                    width = PART if one_copy or masked or not rule.folds_lse else tile
                    for part in range(tile // width):

                        def run(part=part):
                            queries = pl.ds(part * width, width)
                            start_s = wgmma_full((ROWS, width), 0.0)
                            if rule.folds_lse:
                                start_s = over_columns(statistic_smem.at[ring, slot, queries])
                            start_dp = over_columns(delta_smem.at[ring, inner, queries])
                            multiply = functools.partial(products, part=part, width=width)
                            own_buffers = [r.at[:, pl.ds(0, width)] for r in buffers[2:]]
                            with_values(multiply, own_buffers, [start_s, start_dp], interpret=simulate)

                        def attended(*_, part=part):
                            first = q_vector_smem["index"][ring, slot, part * width]
                            return rule.may_attend(first, kv_start, packing.queries, ROWS)

                        near = None
                        if one_copy and skips:
                            near = lax.fori_loop(0, masked.astype(jnp.int32), attended, jnp.bool_(True))
                            pl.when(~near)(lambda: release(do_free.at[ring, inner], interpret=simulate))
                        elif skips and masked:
                            near = attended()
                        run_where(run, near, None if own_bits is None else own_bits.any(part * PART))
                    if not one_copy and masked:
                        release(do_free.at[ring, inner], interpret=simulate)
                    release(q_free.at[ring, slot], interpret=simulate)

                total = walk(item, done, step)
                return *(read(acc, in_flight=0, interpret=simulate) for acc in (dk_acc, dv_acc)), total

            dk, dv, total = with_zeros(accumulate, buffers[:2], [(ROWS, d), (ROWS, dv_dim)], interpret=simulate)
            k_tile[...] = (dk * call.scale).astype(dtype)
            v_tile[...] = dv.astype(dtype)
            plgpu.commit_smem()
            b, kv_head, kv_start, exists = resident_keys(item)  # again: they need not live through the loops

            @pl.when(exists)
            def _store():
                rows = pl.ds(kv_start, ROWS)
                plgpu.copy_smem_to_gmem(k_tile, dk_ref.at[b, rows, kv_head])
                plgpu.copy_smem_to_gmem(v_tile, dv_ref.at[b, rows, kv_head])

            return total

        def store_when_both_finished(x, tile, ref):
            """Writes x by way of a tile that the other warpgroup may still read."""
            plgpu.barrier_arrive(finished)
            plgpu.barrier_wait(finished)
            tile[...] = x.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, ref)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            # The other loads its next keys or values to where this one's results were.
            plgpu.barrier_arrive(finished)
            plgpu.barrier_wait(finished)

        def values_alone(item, done):
            b, kv_head, kv_start, _ = resident_keys(item)
            rows = pl.ds(kv_start, ROWS)
            k_tile = k_smem.at[0]
            plgpu.copy_gmem_to_smem(k_ref.at[b, rows, kv_head], k_tile, resident.at[0])
            kv_rows = load_rows(kv_vector_refs, b, rows)
            buffers = [r.at[0] for r in simulated]
            plgpu.barrier_wait(resident.at[0])

            def accumulate(dv_acc):
                def step(n, _, *, h, start_of, own_bits, masked):
                    slot, inner = lax.rem(n, config.stages), lax.rem(n, config.inner_stages)
                    q_tile, do_tile = q_smem.at[ring, slot], do_smem.at[ring, inner]
                    start = 0 if bias is None else start_of(n)
                    plgpu.barrier_wait(q_ready.at[ring, slot])

                    def statistic():
                        return over_columns(statistic_smem.at[ring, slot])

                    def products(s_acc):
                        mma(s_acc, k_tile, q_tile, transpose_b=True, interpret=simulate)
                        p, weight = rule.probabilities(
                            read(s_acc, in_flight=0, interpret=simulate),
                            None if rule.folds_lse else statistic(),
                            None if bias is None else load_bias(bias_ref, b, h, kv_start, start, (ROWS, tile)),
                            element_mask(slot, pl.ds(0, tile), kv_start, kv_rows, own_bits, 0) if masked else None,
                        )
                        release(q_free.at[ring, slot], interpret=simulate)

                        pl.when(n > done)(lambda: plgpu.barrier_wait(p_free))
                        p_smem[...] = weight
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(p_ready)
                        plgpu.barrier_wait(do_ready.at[ring, inner])
                        mma(dv_acc, p.astype(dtype), do_tile, interpret=simulate)

                    start_s = statistic() if rule.folds_lse else wgmma_full((ROWS, tile), 0.0)
                    with_values(products, buffers[2:3], [start_s], interpret=simulate)
                    release(do_free.at[ring, inner], interpret=simulate)

                total = walk(item, done, step)
                pl.when(total > done)(lambda: plgpu.barrier_wait(p_free))
                return read(dv_acc, in_flight=0, interpret=simulate), total

            dv, total = with_zeros(accumulate, buffers[1:2], [(ROWS, dv_dim)], interpret=simulate)
            store_when_both_finished(dv, v_smem.at[0], dv_ref.at[b, rows, kv_head])
            return total

        def keys_alone(item, done):
            b, kv_head, kv_start, _ = resident_keys(item)
            rows = pl.ds(kv_start, ROWS)
            v_tile = v_smem.at[0]
            plgpu.copy_gmem_to_smem(v_ref.at[b, rows, kv_head], v_tile, resident.at[1])
            buffers = [r.at[1] for r in simulated]
            plgpu.barrier_wait(resident.at[1])

            def accumulate(dk_acc):
                def step(n, _, *, h, start_of, own_bits, masked):
                    slot, inner = lax.rem(n, config.stages), lax.rem(n, config.inner_stages)
                    q_tile, do_tile = q_smem.at[ring, slot], do_smem.at[ring, inner]
                    plgpu.barrier_wait(do_ready.at[ring, inner])

                    def products(dp_acc):
                        mma(dp_acc, v_tile, do_tile, transpose_b=True, interpret=simulate)
                        plgpu.barrier_wait(p_ready)
                        p = plgpu.load(p_smem, layout=WGMMA)
                        release(p_free, interpret=simulate)
                        ds = p * read(dp_acc, in_flight=0, interpret=simulate)
                        release(do_free.at[ring, inner], interpret=simulate)
                        plgpu.barrier_wait(q_ready.at[ring, slot])
                        mma(dk_acc, ds.astype(dtype), q_tile, interpret=simulate)

                    with_values(products, buffers[3:4], [over_columns(delta_smem.at[ring, inner])], interpret=simulate)
                    release(q_free.at[ring, slot], interpret=simulate)

                total = walk(item, done, step)
                return read(dk_acc, in_flight=0, interpret=simulate), total

            dk, total = with_zeros(accumulate, buffers[:1], [(ROWS, d)], interpret=simulate)
            store_when_both_finished(dk * call.scale, k_smem.at[0], dk_ref.at[b, rows, kv_head])
            return total

        def compute(work_on):
            plgpu.set_max_registers(config.compute_registers, action="increase")
            turns.take(turn_refs, work_on, jnp.int32(0))

        if split:
            pl.when(wg == 0)(lambda: compute(values_alone))
            pl.when(wg == 1)(lambda: compute(keys_alone))
        else:
            pl.when(wg < wgs)(lambda: compute(keys_and_values))

        def load_item(turn, number, counts):
            """An item of the memory warpgroup; `counts`: tiles of every ring's earlier items."""
            rank, pair = work.rank_and_pair(number, interleaved_ref)
            b, kv_head, coords = lax.div(pair, kv_heads), lax.rem(pair, kv_heads), coords_of(pair)
            places = [work.place(list_refs, coords(0), rank, ring) for ring in range(work.rings)]
            turns.publish(turn_refs, turn, [pair, *(x for place in places for x in place[:2])])
            for reader in range(wgs if ahead else 0):
                first, _, _ = places[reader if work.rings > 1 else 0]
                start = pl.multiple_of(jnp.maximum(first, 0), ROWS) + (reader * ROWS if work.rings == 1 else 0)
                load_residents(b, start, kv_head, lax.rem(turn, 2) * wgs + reader)

            def head(g, counts):
                h = kv_head * group + g
                spans = [streamed.span(coords(g), column, exists) for _, column, exists in places]

                def fetch(t, counts):
                    for ring, (n, (begin, _, tiles)) in enumerate(zip(counts, spans, strict=True)):

                        @pl.when(t < tiles)
                        def _(ring=ring, n=n, begin=begin):
                            slot, inner = lax.rem(n, config.stages), lax.rem(n, config.inner_stages)
                            start = streamed.start(coords(g), begin, t)
                            queries = pl.ds(start, tile)
                            full, inner_full = q_ready.at[ring, slot], do_ready.at[ring, inner]

                            pl.when(n >= config.stages)(lambda: plgpu.barrier_wait(q_free.at[ring, slot]))
                            packing.load(q_ref, b, start, h, q_smem.at[ring, slot], full)
                            statistics = statistic_ref.at[b, h, queries]
                            plgpu.copy_gmem_to_smem(statistics, statistic_smem.at[ring, slot], full)
                            for name, x_ref in q_vector_refs.items():
                                x = x_ref.at[0 if x_ref.shape[0] == 1 else b, queries]
                                plgpu.copy_gmem_to_smem(x, q_vector_smem[name].at[ring, slot], full)

                            pl.when(n >= config.inner_stages)(lambda: plgpu.barrier_wait(do_free.at[ring, inner]))
                            packing.load(do_ref, b, start, h, do_smem.at[ring, inner], inner_full)
                            plgpu.copy_gmem_to_smem(delta_ref.at[b, h, queries], delta_smem.at[ring, inner], inner_full)

                    return tuple(
                        n + (t < tiles).astype(jnp.int32) for n, (_, _, tiles) in zip(counts, spans, strict=True)
                    )

                return lax.fori_loop(0, functools.reduce(jnp.maximum, [tiles for _, _, tiles in spans]), fetch, counts)

            return lax.fori_loop(0, group, head, counts)

        @pl.when(wg == wgs)
        def _memory_warpgroup():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            counts = turns.deal(turn_refs, counter_ref, load_item, (jnp.int32(0),) * work.rings)
            for ring, count in enumerate(counts if simulate else []):
                drain(q_free, config.stages, count, (ring,))
                drain(do_free, config.inner_stages, count, (ring,))

    outer, inner = (work.rings, config.stages), (work.rings, config.inner_stages)
    transforms = plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)
    shared_p = plgpu.SMEM((ROWS, tile), jnp.float32, transforms=transforms)
    accumulators = (ROWS, d), (ROWS, dv_dim), (ROWS, tile), (ROWS, tile)
    dk, dv = run_kernel(
        kernel,
        "block_sparse_dkv",
        turns.ctas,
        wgs,
        (jax.ShapeDtypeStruct(k.shape, dtype), jax.ShapeDtypeStruct(v.shape, dtype)),
        [
            [q, k, v, d_out],
            [statistic, minus_delta],
            q_vectors,
            kv_vectors,
            ListRefs(*lists),
            work.columns.interleaved(lists, batch),
            None if bias is None else pad_bias(bias.swapaxes(2, 3), kv_size, q_size),
            bits,
            turns.counter(),
        ],
        [
            [swizzled(((1 + ahead) * tile_wgs, ROWS, x), dtype) for x in (d, dv_dim)],
            [swizzled((*outer, tile, d), dtype), plgpu.SMEM((*outer, tile), jnp.float32)],
            [swizzled((*inner, tile, dv_dim), dtype), plgpu.SMEM((*inner, tile), jnp.float32)],
            int_vectors(len(q_vectors), outer, tile),
            [plgpu.SMEM((wgs, *s), jnp.float32) for s in accumulators if simulate],
            plgpu.Barrier(num_arrivals=1 if split else 2, num_barriers=(1 + ahead) * wgs),
            [
                plgpu.Barrier(num_arrivals=packing.pieces(tile) + 1 + len(q_vectors), num_barriers=outer),
                plgpu.Barrier(num_arrivals=packing.pieces(tile) + 1, num_barriers=inner),
                *(plgpu.Barrier(num_arrivals=wgs // work.rings, num_barriers=shape) for shape in (outer, inner)),
            ],
            [shared_p, plgpu.Barrier(), plgpu.Barrier(), plgpu.Barrier(num_arrivals=2)] if split else [None] * 4,
            turns.scratch(),
        ],
        interpret,
    )
    return dk[:, :kv_len], dv[:, :kv_len]
