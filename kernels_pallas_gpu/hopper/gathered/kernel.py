"""dK and dV for Hopper where every query has chosen its own blocks of keys: only the queries that chose them are read.

The transposed lists name blocks of a few queries, with a bit per query. A CTA holds 64 keys. Its memory warpgroup walks
the list of their block and copies every query whose bit is set, with all heads of its group, to the next free rows of a
tile of 64 rows. Two compute warpgroups take the tiles in turn; what they found is added up at the end, always in the
same order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu.hopper.limits import hopper_sms
from xsake.kernels_pallas_gpu.hopper.tile.backward import (
    ALONG_COLS,
    L2_SHARE,
    ROWS,
    WGMMA,
    LogitRule,
    drain,
    mma,
    opaque,
    pad,
    read,
    release,
    run_kernel,
    with_values,
    with_zeros,
)
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import BackwardConfig
from xsake.kernels_pallas_gpu.hopper.tile.bits import Bits
from xsake.kernels_pallas_gpu.hopper.tile.common import ListRefs, RowLists, list_coords, pad_to, swizzled
from xsake.kernels_pallas_gpu.hopper.tile.conditions import when
from xsake.kernels_pallas_gpu.hopper.tile.gather_ring import GatherRing
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing
from xsake.kernels_pallas_gpu.hopper.tile.parts import Columns

Array = jax.Array

WGS = 2  # compute warpgroups
# The longest columns are cut into parts: every query may have chosen one block, the first for instance.
QUERIES_PER_PART, MOST_PARTS = 1024, 8


def unknown(call: Call, d: int, dv: int) -> str | None:
    """Why queries cannot be gathered in a call of head dimensions d and dv, or None."""
    mask = call.mask
    packing = Packing.of(mask.block_q, mask.heads, call.q_heads, call.kv_heads)
    if packing is None or packing.group == 1 or not packing.by_query:
        return "8, 16, 32 or 64 query heads must share a K/V head and its mask of blocks under 64 queries"
    if mask.bitmaps is None or mask.bitmaps.shape[3:] != (1, 1):
        return "the mask must have one bit per query and listed block"
    if call.soft_cap is not None or call.scale <= 0 or call.band.left is not None:
        return "there must be no soft_cap, no window and no scale of 0 or less"
    given = (call.q_segments, call.kv_segments, call.q_positions, call.kv_positions)
    if any(x is not None for x in given):
        return "there must be no segments and no positions"
    return f"head dims {d} and {dv} are more than 256 together" if d + dv > 256 else None


def dkv(
    call: Call,
    lse: Array,
    minus_delta: Array,
    d_out: Array,
    *,
    config: BackwardConfig,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """dK [B, S, K, D] and dV [B, S, K, Dv]."""
    mask = call.mask
    block_q, block_kv = mask.block_q, mask.block_kv
    _, q_len, q_heads, d = call.query.shape
    batch, kv_len, kv_heads, dv_dim = call.value.shape
    packing = Packing(q_heads // kv_heads, block_q)
    group, pieces, dtype = packing.group, packing.pieces(ROWS), call.query.dtype
    stages = config.stages + config.inner_stages
    k, v = (pad_to(x, 8, 1) for x in (call.key, call.value))  # TMA copies tiles of 8 rows
    q, d_out = (pad_to(x, packing.whole, 1) for x in (call.query, d_out))
    rule = LogitRule(scale=call.scale, soft_cap=None, has_bias=False)
    pairs = batch * kv_heads
    ranks, per_block = pl.cdiv(kv_len, block_kv) * (block_kv // ROWS), block_kv // ROWS
    num_parts = min(max(2, q_len // QUERIES_PER_PART), MOST_PARTS)
    columns = Columns(
        pairs=pairs,
        section=max(1, min(pairs, L2_SHARE // (q_len * group * (d + dv_dim) * 2))),
        ranks=ranks,
        early=min(ranks, max(1, hopper_sms() // (num_parts * pairs))),  # their parts fill the chip once
        parts=num_parts,
    )
    simulate = bool(interpret)

    lists = RowLists(mask.q_indices, mask.q_row_ptr, mask.q_num_full, mask.col_order)
    bits = Bits.of(mask.bitmaps, mask.q_bitmap)
    assert bits is not None and bits.words is None, unknown(call, d, dv_dim)
    words = bits.number & jnp.int32(-1 if block_q == 32 else (1 << block_q) - 1)
    # One query more than there are, which has no weight: it fills the last tile.
    q_size = q.shape[1] + packing.whole
    nobody = q.shape[1]
    statistic = packing.of_heads(pad(rule.row_statistic(lse), 2, q_size, -jnp.inf))
    minus_delta = packing.of_heads(pad(minus_delta, 2, q_size))

    def kernel(
        q_ref,
        k_ref,
        v_ref,
        do_ref,
        statistic_ref,
        delta_ref,
        list_refs,
        words_ref,
        chosen_ref,
        dk_ref,
        dv_ref,
        dk_parts_ref,
        dv_parts_ref,
        k_smem,
        v_smem,
        q_smem,
        do_smem,
        statistic_smem,
        delta_smem,
        numbers,
        simulated,
        resident,
        ready,
        free,
        finished,
        handed_over,
    ):
        wg = lax.axis_index("wg")

        def column():
            """Batch entry, head, block, first key, and whether it is part of an early column: (pair, rank, part)."""
            # Computed again where it is needed: what lives through the loops takes registers.
            pair, rank, part = columns.place(opaque(lax.axis_index("cta"), interpret=simulate))
            b, h = lax.div(pair, kv_heads), lax.rem(pair, kv_heads)
            coords = list_coords(list_refs, b, h, num_q_heads=kv_heads, num_kv_heads=kv_heads)
            block = list_refs.ranked(*coords, lax.div(rank, per_block))
            first_key = (block * per_block + lax.rem(rank, per_block)) * ROWS
            return b, h, coords, block, first_key, rank < columns.early, (pair, rank, part)

        b, h, coords, block, kv_start, is_early, (_, _, part) = column()
        begin, _, end = list_refs.row(*coords, block)
        length = end - begin
        end = jnp.where(is_early, begin + lax.div(length * (part + 1), num_parts), end)
        begin = jnp.where(is_early, begin + lax.div(length * part, num_parts), begin)
        count = chosen_ref[(*coords, end)] - chosen_ref[(*coords, begin)]
        tiles = lax.div(count + (pieces - 1), jnp.int32(pieces))
        ring = GatherRing(ready, stages, ROWS * (d + dv_dim) * 2 + 2 * ROWS * 4, interpret=simulate)

        def attends(slot):
            """bool[keys, rows]"""
            shape = (ROWS, ROWS)
            piece = packing.query(plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA))
            query = lax.broadcast_in_dim(numbers[slot, 0], shape, [])
            for i in range(1, pieces):
                query = jnp.where(piece < i, query, lax.broadcast_in_dim(numbers[slot, i], shape, []))
            key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA) + kv_start
            return query + jnp.int32(call.band.right) >= key

        def add_up(dk_acc, dv_acc, buffers):
            def one_tile(n, _):
                tile = WGS * n + wg
                slot = ring.wait(tile)

                def per_col(ref):
                    return lax.broadcast_in_dim(plgpu.load(ref.at[slot], layout=ALONG_COLS), (ROWS, ROWS), [1])

                def products(s_acc, dp_acc, *, masked):
                    q_tile, do_tile = q_smem.at[slot], do_smem.at[slot]
                    # S and dP, transposed: keys by queries
                    mma(s_acc, k_smem, q_tile, transpose_b=True, interpret=simulate)
                    mma(dp_acc, v_smem, do_tile, transpose_b=True, interpret=simulate)
                    s = read(s_acc, in_flight=1, interpret=simulate)
                    # P, while dP is computed
                    p, _ = rule.probabilities(s, None, None, attends(slot) if masked else None)
                    # dV, while dS is computed
                    mma(dv_acc, p.astype(dtype), do_tile, interpret=simulate)
                    ds = p * read(dp_acc, in_flight=1, interpret=simulate)
                    # dK
                    mma(dk_acc, ds.astype(dtype), q_tile, interpret=simulate)

                def run(masked):
                    with_values(
                        functools.partial(products, masked=masked),
                        buffers,
                        [per_col(statistic_smem), per_col(delta_smem)],
                        interpret=simulate,
                    )

                if call.band.right is None:
                    run(False)
                else:
                    near = numbers[slot, pieces] + jnp.int32(call.band.right) < kv_start + (ROWS - 1)
                    when(near)(lambda: run(True))
                    when(jnp.logical_not(near))(lambda: run(False))
                release(free.at[slot], interpret=simulate)

            lax.fori_loop(0, lax.div(tiles + (WGS - 1) - wg, jnp.int32(WGS)), one_tile, None)
            return read(dk_acc, in_flight=0, interpret=simulate), read(dv_acc, in_flight=0, interpret=simulate)

        @when(wg < WGS)
        def _compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")

            @when(wg == 0)
            def _load():
                rows = pl.ds(kv_start, ROWS)
                plgpu.copy_gmem_to_smem(k_ref.at[b, rows, h], k_smem, resident)
                plgpu.copy_gmem_to_smem(v_ref.at[b, rows, h], v_smem, resident)

            plgpu.barrier_wait(resident)
            buffers = [r.at[wg] for r in simulated]
            dk, dv = with_zeros(
                lambda *accs: add_up(*accs, buffers[2:]), buffers[:2], [(ROWS, d), (ROWS, dv_dim)], interpret=simulate
            )
            # The second warpgroup hands its sums over in the ring, which is free when both have finished.
            plgpu.barrier_arrive(finished)
            plgpu.barrier_wait(finished)

            @when(wg == 1)
            def _hand_over():
                for x, ref in ((dk, q_smem), (dv, do_smem)):
                    high = x.astype(dtype)
                    ref.at[0][...] = high
                    ref.at[1][...] = (x - high.astype(jnp.float32)).astype(dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(handed_over)

            @when(wg == 0)
            def _store():
                plgpu.barrier_wait(handed_over)

                def both(x, ref):
                    for part in range(2):
                        x = x + plgpu.load(ref.at[part], layout=WGMMA).astype(jnp.float32)
                    return x

                b, h, _, _, first_key, is_early, at_part = column()
                found = both(dk, q_smem) * call.scale, both(dv, do_smem)

                @when(is_early)
                def _part():
                    for x, ref in zip(found, (dk_parts_ref, dv_parts_ref), strict=True):
                        ref.at[at_part][...] = x

                @when(jnp.logical_not(is_early))
                def _whole():
                    for x, tile, ref in zip(found, (k_smem, v_smem), (dk_ref, dv_ref), strict=True):
                        tile[...] = x.astype(dtype)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(tile, ref.at[b, pl.ds(first_key, ROWS), h])
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @when(wg == WGS)
        def _gather():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            ring.start()
            plgpu.barrier_arrive(resident)

            def copy(n, query, of_statistics, lowest):
                """Row n of all rows: a query, with the statistics of another where it has no weight."""
                tile, piece = lax.div(n, jnp.int32(pieces)), lax.rem(n, jnp.int32(pieces))
                slot = lax.rem(tile, stages)
                lowest = jnp.where(piece == 0, query, lax.min(lowest, query))

                @when((piece == 0) & (tile >= stages))
                def _wait():
                    plgpu.barrier_wait(free.at[slot])

                ring.tell(numbers, slot, piece, query)
                ring.tell(numbers, slot, pieces, lowest)
                row = piece * group
                for x_ref, x_smem in ((q_ref, q_smem), (do_ref, do_smem)):
                    ring.copy_heads(x_ref, (b, query, h * group), x_smem, slot, row, group)
                for x_ref, x_smem in ((statistic_ref, statistic_smem), (delta_ref, delta_smem)):
                    ring.copy_numbers(x_ref, (b, h, of_statistics * group), x_smem, slot, row, group)
                when(piece == pieces - 1)(lambda: ring.complete(slot))
                return lowest

            last_entry = jnp.int32(list_refs.indices.shape[-1] - 1)

            def entry(at):
                at = (*coords, lax.min(at, last_entry))
                # `| 0`: a number as it is read has the varying axes of a `jax.shard_map`, a computed one has none.
                return list_refs.indices[at] * block_q, words_ref[at] | 0

            def one_entry(at, carry):
                n, last, lowest, first, word = carry
                following = entry(at + 1)  # read long before it is needed

                def one_query(carry):
                    n, _, lowest, word = carry
                    query = first + (31 - lax.clz(word & -word))
                    return n + 1, query, copy(n, query, query, lowest), word & (word - 1)

                n, last, lowest, _ = lax.while_loop(lambda c: c[3] != 0, one_query, (n, last, lowest, word))
                return n, last, lowest, *following

            zero = jnp.int32(0)
            n, last, lowest, *_ = lax.fori_loop(begin, end, one_entry, (zero, zero, zero, *entry(begin)))
            lax.fori_loop(n, tiles * pieces, lambda n, lowest: copy(n, last, jnp.int32(nobody), lowest), lowest)
            if simulate:
                drain(free, stages, tiles)

    dk, dv, dk_parts, dv_parts = run_kernel(
        kernel,
        "gathered_dkv",
        columns.ctas,
        WGS,
        (
            jax.ShapeDtypeStruct(k.shape, dtype),
            jax.ShapeDtypeStruct(v.shape, dtype),
            columns.room_for_parts(ROWS, d),
            columns.room_for_parts(ROWS, dv_dim),
        ),
        [q, k, v, d_out, statistic, minus_delta, ListRefs(*lists), words, _chosen(words)],
        [
            swizzled((ROWS, d), dtype),
            swizzled((ROWS, dv_dim), dtype),
            swizzled((stages, ROWS, d), dtype),
            swizzled((stages, ROWS, dv_dim), dtype),
            plgpu.SMEM((stages, ROWS), jnp.float32),
            plgpu.SMEM((stages, ROWS), jnp.float32),
            plgpu.SMEM((stages, pieces + 1), jnp.int32),
            [
                plgpu.SMEM((WGS, *s), jnp.float32)
                for s in ((ROWS, d), (ROWS, dv_dim), (ROWS, ROWS), (ROWS, ROWS))
                if simulate
            ],
            plgpu.Barrier(num_arrivals=3),
            GatherRing.scratch(stages, 4 * pieces, interpret=simulate),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=WGS),
            plgpu.Barrier(),
        ],
        interpret,
    )
    dk, dv = (columns.merged(x, parts, lists, per_block) for x, parts in ((dk, dk_parts), (dv, dv_parts)))
    return dk[:, :kv_len], dv[:, :kv_len]


def _chosen(words: Array) -> Array:
    """i32[b, h, N + 1]: how many queries chose a block of keys in all slots of the lists before each."""
    return jnp.pad(jnp.cumsum(lax.population_count(words), axis=-1), [(0, 0), (0, 0), (1, 0)])
