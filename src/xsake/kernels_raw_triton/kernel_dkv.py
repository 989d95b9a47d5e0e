"""The dK/dV kernel: a program per tile of keys walks the transposed lists of all heads that share the keys.

Each sum has one program, which adds in a fixed order: two runs give the same bits. Tiles are transposed, keys by rows,
so that p and ds are left operands as they come.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xsake.kernels_raw_triton.tile import (
    at_keys,
    at_rows,
    at_statistic,
    attends,
    bits_of,
    bounds,
    exponential,
    list_of,
    load_tile,
    logits,
    rows_of,
    scaled,
    segments,
    slot_of,
    store_tile,
)


@triton.jit
def _walk(
    start, stop, dk, dv, k, v, first, first_column, batch, pack, kv_segment,
    query, d_out, lse, delta, indices, bitmap, bitmaps, q_segments, TESTED: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """(dK, dV) after the blocks of queries of the slots [start, stop)."""
    tile: tl.constexpr = F.tile
    column = tl.arange(0, tile)
    block, number = slot_of(start, indices, bitmap, TESTED, F)
    for n in range(start * F.parts, stop * F.parts):
        token, member, inside = rows_of(block, n % F.parts, F)
        at = at_rows(query, block, pack, batch, token, member, F.head_dim, F.width, F)
        q = scaled(load_tile(at, inside, F.head_dim, F.width, True), F)
        at = at_rows(d_out, block, pack, batch, token, member, F.value_dim, F.width_v, F)
        d_o = load_tile(at, inside, F.value_dim, F.width_v, True)
        row_lse = tl.load(at_statistic(lse, block, pack, batch, token, member, F), mask=inside, other=float("inf"))
        row_delta = tl.load(at_statistic(delta, block, pack, batch, token, member, F), mask=inside, other=0.0)
        x = logits(tl.dot(k, tl.trans(q), input_precision="ieee"), F)
        if TESTED:
            q_token = block * F.block_q + token
            q_segment = block
            if F.has_segments:
                q_segment = segments(q_segments, batch, q_token, inside, -1, F.q_len)[None, :]
            ok = attends(q_token[None, :], (first + column)[:, None], q_segment, kv_segment, F)
            if F.has_bits:
                ok = ok & bits_of(bitmaps, number, token[None, :], (first_column + column)[:, None], F)
            x = tl.where(ok, x, float("-inf"))
        p = exponential(x - row_lse[None, :], F)
        dv = tl.dot(p.to(d_o.dtype), d_o, dv, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(d_o), input_precision="ieee") - row_delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
        block, number = slot_of((n + 1) // F.parts, indices, bitmap, TESTED, F)
    return dk, dv


@triton.jit
def xsake_raw_dkv(
    query, key, value, indices, row_ptr, num_full, order, bitmap, bitmaps, q_segments, kv_segments, d_out, lse, delta,
    dk, dv, F: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    i, rest = program % F.kv_tiles, program // F.kv_tiles
    kv_head, batch = rest % F.kv_heads, rest // F.kv_heads
    block = i // F.split
    if F.has_order:  # of the first list; every order visits all columns
        _, first_number = list_of(kv_head * F.packs_per_kv_head, batch, F)
        block = tl.load(order + first_number * F.kv_blocks + block)
    tile: tl.constexpr = F.tile
    width: tl.constexpr = F.width
    width_v: tl.constexpr = F.width_v
    first_column = (i % F.split) * tile
    first = block * F.block_kv + first_column
    exists = first + tl.arange(0, tile) < F.kv_len
    at = at_keys(key, first, kv_head, batch, F.head_dim, F.width, F)
    k = load_tile(at, exists, F.head_dim, F.width, True)
    at = at_keys(value, first, kv_head, batch, F.value_dim, F.width_v, F)
    v = load_tile(at, exists, F.value_dim, F.width_v, True)
    kv_segment = first
    if F.has_segments:
        kv_segment = segments(kv_segments, batch, first + tl.arange(0, tile), exists, -2, F.kv_len)[:, None]

    sum_k = tl.zeros([tile, width], tl.float32)
    sum_v = tl.zeros([tile, width_v], tl.float32)
    for p in range(F.packs_per_kv_head):
        pack = kv_head * F.packs_per_kv_head + p
        head, number = list_of(pack, batch, F)
        start, full, stop = bounds(row_ptr + number * (F.kv_blocks + 1), num_full + number * F.kv_blocks, block, F)
        slots = indices + number * F.capacity
        of_slots, table = bitmap, bitmaps
        if F.has_bits:
            of_slots = bitmap + number * F.capacity
            if F.table_batch > 1:
                table += batch.to(tl.int64) * (F.table_heads * F.table_size)
            if F.table_heads > 1:
                table += head.to(tl.int64) * F.table_size
        if F.full_is_exact:
            sum_k, sum_v = _walk(
                start, full, sum_k, sum_v, k, v, first, first_column, batch, pack, kv_segment,
                query, d_out, lse, delta, slots, of_slots, table, q_segments, False, F,
            )  # fmt: skip
        sum_k, sum_v = _walk(
            full, stop, sum_k, sum_v, k, v, first, first_column, batch, pack, kv_segment,
            query, d_out, lse, delta, slots, of_slots, table, q_segments, True, F,
        )  # fmt: skip
    if not F.natural:  # otherwise the queries have it
        sum_k = sum_k * F.scale
    store_tile(at_keys(dk, first, kv_head, batch, F.head_dim, F.width, F), sum_k, exists, F.head_dim, F.width)
    store_tile(at_keys(dv, first, kv_head, batch, F.value_dim, F.width_v, F), sum_v, exists, F.value_dim, F.width_v)
