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

from xsake.hads.mask.band import Band
from xsake.kernels_pallas_gpu.mosaic_backward_common import (
    ALONG_COLS,
    ALONG_ROWS,
    PART,
    ROWS,
    WGMMA,
    BackwardConfig,
    LogitRule,
    WorkGrid,
    drain,
    early_ranks,
    load_bias,
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
from xsake.kernels_pallas_gpu.mosaic_bits import Bits, TileBits
from xsake.kernels_pallas_gpu.mosaic_common import ListRefs, RowLists, list_coords, pad_to, swizzled, wgmma_full
from xsake.kernels_pallas_gpu.mosaic_packing import Packing

Array = jax.Array


def dkv(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    lse: Array,
    delta: Array,
    lists: RowLists,
    *,
    block_q: int,
    block_kv: int,
    scale: float,
    band: Band,
    soft_cap: float | None,
    full_is_exact: bool,
    q_segments: Array | None = None,
    kv_segments: Array | None = None,
    q_positions: Array | None = None,
    kv_positions: Array | None = None,
    bias: Array | None = None,
    bits: Bits | None = None,
    config: BackwardConfig,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """dK [B, S, K, D] and dV [B, S, K, Dv]; `lists` has one row per KV block."""
    batch, q_len, q_heads, d = q.shape
    _, kv_len, kv_heads, dv_dim = v.shape
    packing = Packing.required(block_q, lists, q_heads, kv_heads, bias)
    q_heads //= packing.group
    pairs, group = batch * kv_heads, q_heads // kv_heads
    k, v = (pad_to(x, 8, 1) for x in (k, v))  # TMA copies tiles of 8 rows
    q, dout = (pad_to(x, packing.whole, 1) for x in (q, dout))
    dtype, tile, wgs = q.dtype, config.tile, config.compute_wgs
    if packing.rows % tile:
        raise ValueError(f"{block_q=}, {packing.rows} rows, must be a multiple of {config.tile=}")
    tiles_per_block = packing.rows // tile
    rule = LogitRule(
        scale=scale,
        band=band,
        soft_cap=soft_cap,
        has_bias=bias is not None,
        rows_share_bias=bias is not None and bias.shape[2] == 1 and q_len % block_q != 0,
    )
    # Where the accumulators of dK and dV do not fit in the registers of one warpgroup, two warpgroups share 64 keys.
    # The first computes P and dV, the second dP and dK; P goes from the first to the second through shared memory.
    split = d + dv_dim > 256 if config.split is None else config.split
    if split and (wgs != 2 or tile != ROWS):
        raise ValueError(f"head dims {d} and {dv_dim} need compute_wgs=2 and tile={ROWS}, got {config}")
    tile_wgs = 1 if split else wgs  # warpgroups that hold keys of their own
    streamed = packing.group * group * q_len * (d + dv_dim) * 2
    work = WorkGrid.make(pairs, kv_len, block_kv, tile_wgs, streamed, early=early_ranks(pairs))
    simulate = bool(interpret)
    # Whether full and masked tiles share their code, because every copy takes time to compile.
    one_copy = (
        rule.folds_lse and bits is None and tile == PART and not split and (rule.by_position or q_segments is not None)
    )

    q_size = pl.cdiv(q_len, block_q) * block_q
    kv_size = pl.cdiv(kv_len, block_kv) * block_kv
    # Queries past the end are padded as empty rows, whose p is 0. The store drops keys past the end.
    statistic = packing.of_heads(pad(rule.row_statistic(lse), 2, q_size, -jnp.inf if rule.folds_lse else jnp.inf))
    neg_delta = packing.of_heads(pad(-delta, 2, q_size))
    skips = rule.by_position and q_positions is None
    q_vectors = vectors(
        q_size,
        position=q_positions if rule.by_position else None,
        segment=q_segments,
        index=jnp.arange(q_size, dtype=jnp.int32)[None] if skips else None,
    )
    q_vectors = {name: packing.of_tokens(x) for name, x in q_vectors.items()}
    kv_vectors = vectors(kv_size, position=kv_positions if rule.by_position else None, segment=kv_segments)

    def kernel(
        q_ref,
        k_ref,
        v_ref,
        do_ref,
        statistic_ref,
        delta_ref,
        q_vector_refs,
        kv_vector_refs,
        list_refs,
        interleaved_ref,
        bias_ref,
        bit_refs,
        dk_ref,
        dv_ref,
        k_smem,
        v_smem,
        q_smem,
        do_smem,
        statistic_smem,
        delta_smem,
        q_vector_smem,
        p_smem,
        simulated,
        resident,
        q_ready,
        do_ready,
        q_free,
        do_free,
        p_ready,
        p_free,
        finished,
    ):
        wg = lax.axis_index("wg")
        rank, pair = work.rank_and_pair(lax.axis_index("cta"), interleaved_ref)
        b, kv_head = lax.div(pair, kv_heads), lax.rem(pair, kv_heads)

        def coords(g):
            return list_coords(list_refs, b, kv_head * group + g, num_q_heads=q_heads, num_kv_heads=kv_heads)

        def column_tiles(g, block, exists):
            """(first list entry, tiles of full blocks, tiles of all blocks) of a mask column in the group's head g."""
            begin, full_end, end = list_refs.row(*coords(g), block)
            full, total = full_end - begin if full_is_exact else jnp.int32(0), end - begin
            if exists is not True:
                full, total = jnp.where(exists, full, 0), jnp.where(exists, total, 0)
            return begin, full * tiles_per_block, total * tiles_per_block

        def q_start_of(g, begin, t):
            block = list_refs.indices[(*coords(g), begin + lax.div(t, tiles_per_block))]
            return block * packing.rows + lax.rem(t, tiles_per_block) * tile

        ring = 0 if work.rings == 1 else wg

        def resident_keys():
            """(index of the first key, mask column, whether the rank has keys for this ring)."""
            kv_start, block, exists = work.place(list_refs, coords(0), rank, ring)
            return (kv_start if split or work.rings > 1 else kv_start + wg * ROWS), block, exists

        def load_rows(refs, rows):
            return {name: plgpu.load(r.at[b, rows], layout=ALONG_ROWS, optimized=False) for name, r in refs.items()}

        def per_col(ref, width):
            return lax.broadcast_in_dim(plgpu.load(ref, layout=ALONG_COLS), (ROWS, width), [1])

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

        def walk(block, exists, step):
            """Calls `step(n, ...)` for every tile of the column, head after head; returns the number of tiles."""

            def head(g, n):
                begin, full_tiles, tiles = column_tiles(g, block, exists)

                def bitmap_of(m):
                    slot = begin + lax.div(m - n, tiles_per_block)
                    return None if bits is None else bit_refs.of_slot(coords(g), slot)

                def masked_step(m, bitmap):
                    following = bitmap_of(m + 1)  # read long before it is needed
                    row = lax.rem(m - n, tiles_per_block) * tile
                    own = None if bits is None else TileBits(bit_refs, coords(g), bitmap, row, packing)
                    at(m, None, own_bits=own, masked=True)
                    return following

                at = functools.partial(step, h=kv_head * group + g)
                at = functools.partial(at, start_of=lambda m: q_start_of(g, begin, m - n))
                if one_copy:
                    lax.fori_loop(n, n + tiles, lambda m, _: at(m, _, own_bits=None, masked=m >= n + full_tiles), None)
                    return n + tiles
                lax.fori_loop(n, n + full_tiles, functools.partial(at, own_bits=None, masked=False), None)
                lax.fori_loop(n + full_tiles, n + tiles, masked_step, bitmap_of(n + full_tiles))
                return n + tiles

            return head(0, jnp.int32(0)) if group == 1 else lax.fori_loop(0, group, head, jnp.int32(0))

        def compute_warpgroup():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            kv_start, block, exists = resident_keys()
            rows = pl.ds(kv_start, ROWS)
            k_tile, v_tile = k_smem.at[wg], v_smem.at[wg]
            plgpu.copy_gmem_to_smem(k_ref.at[b, rows, kv_head], k_tile, resident.at[wg])
            plgpu.copy_gmem_to_smem(v_ref.at[b, rows, kv_head], v_tile, resident.at[wg])
            kv_rows = load_rows(kv_vector_refs, rows)
            buffers = [r.at[wg] for r in simulated]
            plgpu.barrier_wait(resident.at[wg])

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
                        own = opaque(wg, interpret=simulate)
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
                            None if rule.folds_lse else per_col(statistic_smem.at[ring, slot, queries], width),
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
                                start_s = per_col(statistic_smem.at[ring, slot, queries], width)
                            start_dp = per_col(delta_smem.at[ring, inner, queries], width)
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

                walk(block, exists, step)
                return read(dk_acc, in_flight=0, interpret=simulate), read(dv_acc, in_flight=0, interpret=simulate)

            dk, dv = with_zeros(accumulate, buffers[:2], [(ROWS, d), (ROWS, dv_dim)], interpret=simulate)
            k_tile[...] = (dk * scale).astype(dtype)
            v_tile[...] = dv.astype(dtype)
            plgpu.commit_smem()

            @pl.when(exists)
            def _store():
                plgpu.copy_smem_to_gmem(k_tile, dk_ref.at[b, rows, kv_head])
                plgpu.copy_smem_to_gmem(v_tile, dv_ref.at[b, rows, kv_head])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def store_when_both_finished(x, tile, ref):
            """Writes x by way of a tile that the other warpgroup may still read."""
            plgpu.barrier_arrive(finished)
            plgpu.barrier_wait(finished)
            tile[...] = x.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, ref)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def value_warpgroup():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            kv_start, block, exists = resident_keys()
            rows = pl.ds(kv_start, ROWS)
            k_tile = k_smem.at[0]
            plgpu.copy_gmem_to_smem(k_ref.at[b, rows, kv_head], k_tile, resident.at[0])
            kv_rows = load_rows(kv_vector_refs, rows)
            buffers = [r.at[0] for r in simulated]
            plgpu.barrier_wait(resident.at[0])

            def accumulate(dv_acc):
                def step(n, _, *, h, start_of, own_bits, masked):
                    slot, inner = lax.rem(n, config.stages), lax.rem(n, config.inner_stages)
                    q_tile, do_tile = q_smem.at[ring, slot], do_smem.at[ring, inner]
                    start = 0 if bias is None else start_of(n)
                    plgpu.barrier_wait(q_ready.at[ring, slot])

                    def statistic():
                        return per_col(statistic_smem.at[ring, slot], tile)

                    def products(s_acc):
                        mma(s_acc, k_tile, q_tile, transpose_b=True, interpret=simulate)
                        p, weight = rule.probabilities(
                            read(s_acc, in_flight=0, interpret=simulate),
                            None if rule.folds_lse else statistic(),
                            None if bias is None else load_bias(bias_ref, b, h, kv_start, start, (ROWS, tile)),
                            element_mask(slot, pl.ds(0, tile), kv_start, kv_rows, own_bits, 0) if masked else None,
                        )
                        release(q_free.at[ring, slot], interpret=simulate)

                        pl.when(n > 0)(lambda: plgpu.barrier_wait(p_free))
                        p_smem[...] = weight
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(p_ready)
                        plgpu.barrier_wait(do_ready.at[ring, inner])
                        mma(dv_acc, p.astype(dtype), do_tile, interpret=simulate)

                    start_s = statistic() if rule.folds_lse else wgmma_full((ROWS, tile), 0.0)
                    with_values(products, buffers[2:3], [start_s], interpret=simulate)
                    release(do_free.at[ring, inner], interpret=simulate)

                count = walk(block, exists, step)

                pl.when(count > 0)(lambda: plgpu.barrier_wait(p_free))
                return read(dv_acc, in_flight=0, interpret=simulate)

            dv = with_zeros(accumulate, buffers[1:2], [(ROWS, dv_dim)], interpret=simulate)
            store_when_both_finished(dv, v_smem.at[0], dv_ref.at[b, rows, kv_head])

        def key_warpgroup():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            kv_start, block, exists = resident_keys()
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

                    with_values(products, buffers[3:4], [per_col(delta_smem.at[ring, inner], tile)], interpret=simulate)
                    release(q_free.at[ring, slot], interpret=simulate)

                walk(block, exists, step)
                return read(dk_acc, in_flight=0, interpret=simulate)

            dk = with_zeros(accumulate, buffers[:1], [(ROWS, d)], interpret=simulate)
            store_when_both_finished(dk * scale, k_smem.at[0], dk_ref.at[b, rows, kv_head])

        if split:
            pl.when(wg == 0)(value_warpgroup)
            pl.when(wg == 1)(key_warpgroup)
        else:
            pl.when(wg < wgs)(compute_warpgroup)

        @pl.when(wg == wgs)
        def _memory_warpgroup():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            places = [work.place(list_refs, coords(0), rank, ring)[1:] for ring in range(work.rings)]

            def head(g, counts):
                h = kv_head * group + g
                spans = [column_tiles(g, block, exists) for block, exists in places]

                def fetch(t, counts):
                    for ring, (n, (begin, _, tiles)) in enumerate(zip(counts, spans, strict=True)):

                        @pl.when(t < tiles)
                        def _(ring=ring, n=n, begin=begin):
                            slot, inner = lax.rem(n, config.stages), lax.rem(n, config.inner_stages)
                            start = q_start_of(g, begin, t)
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

            counts = lax.fori_loop(0, group, head, (jnp.int32(0),) * work.rings)
            for ring, count in enumerate(counts if simulate else []):
                drain(q_free, config.stages, count, (ring,))
                drain(do_free, config.inner_stages, count, (ring,))

    outer, inner = (work.rings, config.stages), (work.rings, config.inner_stages)
    arrivals = wgs // work.rings
    transforms = plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)
    accumulators = (ROWS, d), (ROWS, dv_dim), (ROWS, tile), (ROWS, tile)
    dk, dv = run_kernel(
        kernel,
        "block_sparse_dkv",
        work.ctas,
        wgs,
        (jax.ShapeDtypeStruct(k.shape, dtype), jax.ShapeDtypeStruct(v.shape, dtype)),
        [
            q,
            k,
            v,
            dout,
            statistic,
            neg_delta,
            q_vectors,
            kv_vectors,
            ListRefs(*lists),
            work.columns.interleaved(lists, batch),
            None if bias is None else pad_bias(bias.swapaxes(2, 3), kv_size, q_size),
            bits,
        ],
        [
            swizzled((tile_wgs, ROWS, d), dtype),
            swizzled((tile_wgs, ROWS, dv_dim), dtype),
            swizzled((*outer, tile, d), dtype),
            swizzled((*inner, tile, dv_dim), dtype),
            plgpu.SMEM((*outer, tile), jnp.float32),
            plgpu.SMEM((*inner, tile), jnp.float32),
            {name: plgpu.SMEM((*outer, tile), jnp.int32) for name in q_vectors},
            plgpu.SMEM((ROWS, tile), jnp.float32, transforms=transforms) if split else None,
            [plgpu.SMEM((wgs, *s), jnp.float32) for s in accumulators if simulate],
            plgpu.Barrier(num_arrivals=1 if split else 2, num_barriers=wgs),
            plgpu.Barrier(num_arrivals=packing.pieces(tile) + 1 + len(q_vectors), num_barriers=outer),
            plgpu.Barrier(num_arrivals=packing.pieces(tile) + 1, num_barriers=inner),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=outer),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=inner),
            *([plgpu.Barrier(), plgpu.Barrier(), plgpu.Barrier(num_arrivals=2)] if split else [None] * 3),
        ],
        interpret,
    )
    return dk[:, :kv_len], dv[:, :kv_len]
