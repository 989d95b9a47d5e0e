"""The forward kernel: a program per tile of rows walks the list of its block of queries with an online softmax."""

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
    start, stop, peak, total, acc, q, block, batch, kv_head, token, inside, q_segment,
    key, value, indices, bitmap, bitmaps, kv_segments, TESTED: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """(peak, total, acc) after the blocks of the slots [start, stop)."""
    tile: tl.constexpr = F.tile
    kv_block, number = slot_of(start, indices, bitmap, TESTED, F)
    for n in range(start * F.split, stop * F.split):
        first_column = (n % F.split) * tile
        first = kv_block * F.block_kv + first_column
        column = tl.arange(0, tile)
        exists = first + column < F.kv_len
        # QK
        k = load_tile(at_keys(key, first, kv_head, batch, F.head_dim, F.width, F), exists, F.head_dim, F.width, TESTED)
        x = logits(tl.dot(q, tl.trans(k), input_precision="ieee"), F)
        if TESTED:
            kv_segment = first
            if F.has_segments:
                kv_segment = segments(kv_segments, batch, first + column, exists, -2, F.kv_len)[None, :]
            ok = attends((block * F.block_q + token)[:, None], (first + column)[None, :], q_segment, kv_segment, F)
            if F.has_bits:
                ok = ok & bits_of(bitmaps, number, token[:, None], (first_column + column)[None, :], F)
            x = tl.where(ok, x, float("-inf"))
        # Softmax; a row may have attended nothing yet.
        new_peak = tl.maximum(peak, tl.max(x, 1))
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = exponential(peak - safe, F)
        p = exponential(x - safe[:, None], F)
        total = total * decay + tl.sum(p, 1)
        # PV
        v = load_tile(
            at_keys(value, first, kv_head, batch, F.value_dim, F.width_v, F), exists, F.value_dim, F.width_v, TESTED
        )
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        peak = new_peak
        kv_block, number = slot_of((n + 1) // F.split, indices, bitmap, TESTED, F)
    return peak, total, acc


@triton.jit
def xsake_raw_forward(
    query, key, value, indices, row_ptr, num_full, order, bitmap, bitmaps, q_segments, kv_segments, sink,
    out, lse, F: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    i, rest = program % F.q_tiles, program // F.q_tiles
    pack, batch = rest % F.packs, rest // F.packs
    head, number = list_of(pack, batch, F)
    block, part = i // F.parts, i % F.parts
    if F.has_order:  # the first programs take the longest rows
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
    q_segment = block
    if F.has_segments:
        q_segment = segments(q_segments, batch, block * F.block_q + token, inside, -1, F.q_len)[:, None]

    rows: tl.constexpr = F.rows
    width_v: tl.constexpr = F.width_v
    peak = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, width_v], tl.float32)
    if F.full_is_exact:
        peak, total, acc = _walk(
            start, full, peak, total, acc, q, block, batch, kv_head, token, inside, q_segment,
            key, value, indices, bitmap, bitmaps, kv_segments, False, F,
        )  # fmt: skip
    peak, total, acc = _walk(
        full, stop, peak, total, acc, q, block, batch, kv_head, token, inside, q_segment,
        key, value, indices, bitmap, bitmaps, kv_segments, True, F,
    )  # fmt: skip

    if F.has_sink:
        at = sink + pack * F.pack + member
        if F.sink_batch > 1:
            at += batch * F.q_heads
        logit = tl.load(at) * F.one
        top = tl.where(logit > peak, logit, peak)
        safe = tl.where(top == float("-inf"), 0.0, top)
        decay = exponential(peak - safe, F)
        total = total * decay + exponential(logit - safe, F)  # a NaN sink makes the whole row NaN
        acc = acc * decay[:, None]
        peak = top
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    if F.natural:
        logarithm = tl.log(total)
    else:
        logarithm = tl.log2(total)
    at = at_rows(out, block, pack, batch, token, member, F.value_dim, F.width_v, F)
    store_tile(at, acc / total[:, None], inside, F.value_dim, F.width_v)
    found = tl.where(empty, float("-inf"), (peak + logarithm) * (1.0 / F.one))
    tl.store(at_statistic(lse, block, pack, batch, token, member, F), found, mask=inside)
