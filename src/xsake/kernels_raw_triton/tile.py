"""What the Triton kernels share: rows of a tile, masked loads, the element rule, and the bounds of a list.

A row is a query of one head: row r of a block of queries is its token r // pack, of the head r % pack of those that
share the list. Loads therefore read [B, T, H, D] in place. `F` is a `facts.Facts`; what is known of a call while
tracing is part of the compiled kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def list_of(pack, batch, F: tl.constexpr):
    """The head of the mask that has the list of a pack of heads, and that list's number."""
    head = pack * F.pack * F.mask_heads // F.q_heads
    number = head
    if F.mask_batch > 1:
        number = batch * F.mask_heads + head
    return head, number.to(tl.int64)


@triton.jit
def bounds(row_ptr, num_full, row, F: tl.constexpr):
    """Slots (start, end of full blocks, end) of a row. Clamped: pointers of a mask that overflowed point too far."""
    start = tl.minimum(tl.load(row_ptr + row), F.capacity)
    stop = tl.minimum(tl.load(row_ptr + row + 1), F.capacity)
    full = start
    if F.full_is_exact:
        full = tl.minimum(start + tl.load(num_full + row), stop)
    return start, full, stop


@triton.jit
def slot_of(slot, indices, bitmap, TESTED: tl.constexpr, F: tl.constexpr):
    """The block of a slot and its bitmap's number, which loops read one step ahead: what they load then depends on no
    load of the same step, and all stages of the pipeline hold keys or rows. The minimum is for the step past the last.
    """
    at = tl.minimum(slot, F.capacity - 1)
    block = tl.load(indices + at)
    number = block
    if TESTED and F.has_bits:
        number = tl.load(bitmap + at)
    return block, number


@triton.jit
def rows_of(block, part, F: tl.constexpr):
    """(token in the block, head in the pack, whether there is such a query) of the rows of a tile."""
    rows: tl.constexpr = F.rows
    row = part * rows + tl.arange(0, rows)
    token = row // F.pack
    inside = (token < F.block_q) & (block * F.block_q + token < F.q_len)
    return tl.minimum(token, F.block_q - 1), row % F.pack, inside


@triton.jit
def at_rows(array, block, pack, batch, token, member, dim: tl.constexpr, width: tl.constexpr, F: tl.constexpr):
    """Pointers [rows, width] into [B, T, H, dim]."""
    first = ((batch.to(tl.int64) * F.q_len + block * F.block_q) * F.q_heads + pack * F.pack) * dim
    return array + first + ((token * F.q_heads + member) * dim)[:, None] + tl.arange(0, width)[None, :]


@triton.jit
def at_statistic(array, block, pack, batch, token, member, F: tl.constexpr):
    """Pointers [rows] into [B, H, T]."""
    first = (batch.to(tl.int64) * F.q_heads + pack * F.pack) * F.q_len + block * F.block_q
    return array + first + member.to(tl.int64) * F.q_len + token


@triton.jit
def at_keys(array, first, kv_head, batch, dim: tl.constexpr, width: tl.constexpr, F: tl.constexpr):
    """Pointers [tile, width] into [B, S, K, dim]."""
    tile: tl.constexpr = F.tile
    start = ((batch.to(tl.int64) * F.kv_len + first) * F.kv_heads + kv_head) * dim
    return array + start + (tl.arange(0, tile) * (F.kv_heads * dim))[:, None] + tl.arange(0, width)[None, :]


@triton.jit
def load_tile(pointers, inside, dim: tl.constexpr, width: tl.constexpr, MASKED: tl.constexpr):
    """[n, width], 0 past `dim` and, if MASKED, where not `inside` [n]."""
    if width != dim:
        column = tl.arange(0, width)[None, :] < dim
        if MASKED:
            found = tl.load(pointers, mask=inside[:, None] & column, other=0.0)
        else:
            found = tl.load(pointers, mask=column, other=0.0)
    elif MASKED:
        found = tl.load(pointers, mask=inside[:, None], other=0.0)
    else:
        found = tl.load(pointers)
    return found


@triton.jit
def store_tile(pointers, values, inside, dim: tl.constexpr, width: tl.constexpr):
    mask = inside[:, None]
    if width != dim:
        mask = mask & (tl.arange(0, width)[None, :] < dim)
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def bits_of(bitmaps, number, token, column, F: tl.constexpr):
    """Whether the bit of a token and a column of a block is set; the shapes of both broadcast."""
    at = bitmaps + number.to(tl.int64) * (F.columns * F.words)
    if F.columns > 1:
        at = at + column * F.words
    if F.words > 1:
        at = at + token // 32
    return ((tl.load(at) >> (token % 32).to(tl.uint32)) & 1) != 0


@triton.jit
def attends(q_token, kv_token, q_segment, kv_segment, F: tl.constexpr):
    """The rule of all elements; arrays of queries lie along one axis, and those of keys along the other."""
    ok = kv_token < F.kv_len
    if F.right is not None:
        ok = ok & (kv_token - q_token <= F.right)
    if F.left is not None:
        ok = ok & (kv_token - q_token >= -F.left)
    if F.has_segments:
        ok = ok & (q_segment == kv_segment)
    return ok


@triton.jit
def segments(array, batch, token, inside, outside: tl.constexpr, length: tl.constexpr):
    """Segment ids of tokens; `outside` where there is no token: -1 for queries and -2 for keys never agree."""
    return tl.load(array + batch.to(tl.int64) * length + token, mask=inside, other=outside)


@triton.jit
def exponential(x, F: tl.constexpr):
    """exp of logits in the units of `F.one`: base 2 for 16-bit inputs, natural for float32."""
    if F.natural:
        x = x * LOG2_E
    return tl.exp2(x)


@triton.jit
def scaled(q, F: tl.constexpr):
    """Queries as they are multiplied: in float32 they have the scale, which saves the logits a rounding."""
    if F.natural:
        q = q * F.scale
    return q


@triton.jit
def logits(products, F: tl.constexpr):
    if not F.natural:
        products = products * (F.scale * F.one)
    return products
