"""The dQ kernel: a program per tile of rows walks the list of its block of queries, as the forward does."""

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
    start, stop, acc, q, d_out, lse, delta, block, batch, kv_head, token, q_segment,
    key, value, indices, bitmap, bitmaps, kv_segments, TESTED: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """dQ without its scale after the blocks of the slots [start, stop)."""
    tile: tl.constexpr = F.tile
    kv_block, number = slot_of(start, indices, bitmap, TESTED, F)
    for n in range(start * F.split, stop * F.split):
        first_column = (n % F.split) * tile
        first = kv_block * F.block_kv + first_column
        column = tl.arange(0, tile)
        exists = first + column < F.kv_len
        k = load_tile(at_keys(key, first, kv_head, batch, F.head_dim, F.width, F), exists, F.head_dim, F.width, TESTED)
        v = load_tile(
            at_keys(value, first, kv_head, batch, F.value_dim, F.width_v, F), exists, F.value_dim, F.width_v, TESTED
        )
        x = logits(tl.dot(q, tl.trans(k), input_precision="ieee"), F)
        if TESTED:
            kv_segment = first
            if F.has_segments:
                kv_segment = segments(kv_segments, batch, first + column, exists, -2, F.kv_len)[None, :]
            ok = attends((block * F.block_q + token)[:, None], (first + column)[None, :], q_segment, kv_segment, F)
            if F.has_bits:
                ok = ok & bits_of(bitmaps, number, token[:, None], (first_column + column)[None, :], F)
            x = tl.where(ok, x, float("-inf"))
        p = exponential(x - lse[:, None], F)
        ds = p * (tl.dot(d_out, tl.trans(v), input_precision="ieee") - delta[:, None])
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")
        kv_block, number = slot_of((n + 1) // F.split, indices, bitmap, TESTED, F)
    return acc


@triton.jit
def xsake_raw_dq(
    query, key, value, indices, row_ptr, num_full, order, bitmap, bitmaps, q_segments, kv_segments, d_out, lse, delta,
    dq, F: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    i, rest = program % F.q_tiles, program // F.q_tiles
    pack, batch = rest % F.packs, rest // F.packs
    head, number = list_of(pack, batch, F)
    block, part = i // F.parts, i % F.parts
    if F.has_order:
        block = tl.load(order + number * F.q_blocks + block)
    start, full, stop = bounds(row_ptr + number * (F.q_blocks + 1), num_full + number * F.q_blocks, block, F)
    indices += number * F.capacity
    if F.has_bits:
        bitmap += number * F.capacity
        if F.table_batch > 1:
            bitmaps += batch.to(tl.int64) * (F.table_heads * F.table_size)
        if F.table_heads > 1:
            bitmaps += head.to(tl.int64) * F.table_size

    token, member, inside = rows_of(block, part, F)
    kv_head = pack * F.pack // F.group
    at = at_rows(query, block, pack, batch, token, member, F.head_dim, F.width, F)
    q = scaled(load_tile(at, inside, F.head_dim, F.width, True), F)
    at = at_rows(d_out, block, pack, batch, token, member, F.value_dim, F.width_v, F)
    d_out_tile = load_tile(at, inside, F.value_dim, F.width_v, True)
    # A row that attends nothing has lse = +inf here: its weights are exp(-inf) = 0.
    row_lse = tl.load(at_statistic(lse, block, pack, batch, token, member, F), mask=inside, other=float("inf"))
    row_delta = tl.load(at_statistic(delta, block, pack, batch, token, member, F), mask=inside, other=0.0)
    q_segment = block
    if F.has_segments:
        q_segment = segments(q_segments, batch, block * F.block_q + token, inside, -1, F.q_len)[:, None]

    rows: tl.constexpr = F.rows
    width: tl.constexpr = F.width
    acc = tl.zeros([rows, width], tl.float32)
    if F.full_is_exact:
        acc = _walk(
            start, full, acc, q, d_out_tile, row_lse, row_delta, block, batch, kv_head, token, q_segment,
            key, value, indices, bitmap, bitmaps, kv_segments, False, F,
        )  # fmt: skip
    acc = _walk(
        full, stop, acc, q, d_out_tile, row_lse, row_delta, block, batch, kv_head, token, q_segment,
        key, value, indices, bitmap, bitmaps, kv_segments, True, F,
    )  # fmt: skip
    at = at_rows(dq, block, pack, batch, token, member, F.head_dim, F.width, F)
    store_tile(at, acc * F.scale, inside, F.head_dim, F.width)
