"""`selection.step` as three GPU kernels: what decoding waits for is the number of kernels, however small.

    logits    programs per tile of blocks: every head's logits, from the pooled keys, which are read once
    gains     programs per KV head: masses, the group's shares of them, keys, the sorted keys, the order of their gains
    lists     programs per KV head: the cut over all KV heads, which each program finds by itself, and the head's list

No array is prepared or padded by XLA between them. Nothing is masked by XLA either: where a power of two of blocks or
heads is more than there are, a kernel reads the last one again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float, Int

from xsake.hads.mask.lists.triton_call import TILE, iota, triton_call, whole
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.estimator import BUCKETS, KINDS, Estimator
from xsake.hads.selection.gain import FORCED, gains_of_sorted, key_of
from xsake.hads.selection.gpu.sort import sort_rows
from xsake.hads.selection.pooled import KIND_OF_PART, query_parts
from xsake.hads.selection.step.blocks import blocks_inside

_LOGITS_WARPS, _GAINS_WARPS = 8, 4
_TOGETHER = 8192  # numbers in the registers of a program: with four warps, and much beside them, logits would spill
_MOST_ROWS = 8  # queries at a time: the loads of one query would wait for the loads of another
# A query alone has no variance, and so no product with the squared means of keys.
_PARTS = tuple(part for part, kind in enumerate(KIND_OF_PART) if KINDS[kind] != "queries")
_TOKENS_PARTS = (0, 1)  # the mean and variance of keys, whose products make the tokens' feature (`selection.step`)


class Gains(NamedTuple):
    """The blocks of each KV head: their keys by column, the keys sorted upwards, integers that order as gains do.

    A key is -1, and an order 0, where there is no block that the new tokens see.
    """

    keys: Int[Array, "B K width"]
    in_order: Int[Array, "B K width"]
    order: Int[Array, "B K width"]


def _width(blocks: int) -> int:
    return max(pl.next_power_of_2(blocks), TILE)


# -- logits ----------------------------------------------------------------------------------------------------------


def logits(
    query: Float[Array, "B T H D"],
    features: Float[Array, "B K n five D"],
    estimator: Estimator,
    lengths: Int[Array, "B"],
    *,
    block: int,
    reach: int,
) -> Float[Array, "B K T group n"]:
    """Logits of each query's blocks, the last T of each sequence; -inf where the query does not see the block."""
    b, t, h, d = query.shape
    kv_heads, n = features.shape[1:3]
    group = h // kv_heads
    rows, tile = min(pl.next_power_of_2(t * group), _MOST_ROWS), _TOGETHER // (_MOST_ROWS * d)

    def kernel(
        query_ref: Any,
        features_ref: Any,
        weights_ref: Any,
        tokens_ref: Any,
        distance_ref: Any,
        sink_ref: Any,
        length_ref: Any,
        out_ref: Any,
    ) -> None:
        column = jnp.minimum(pl.program_id(0) * tile + iota(tile), n - 1)
        there = _grid(column, iota(d))
        keys = {part: plgpu.load(features_ref.at[there[0], part, there[1]]) for part in _PARTS}
        pair = lax.rem(iota(d), jnp.int32(d // 2))

        def some(number: Array, _: None) -> None:
            row = jnp.minimum(number * rows + iota(rows), t * group - 1)
            token, head = lax.div(row, jnp.int32(group)), lax.rem(row, jnp.int32(group))
            q = plgpu.load(query_ref.at[(_grid(token, iota(d))[0], *_grid(head, iota(d)))]).astype(jnp.float32)
            of_query = query_parts(q, jnp.zeros_like(q))
            products = jnp.zeros((rows, tile, d), jnp.float32)
            for part in _PARTS:
                of_head, of_pair = _grid(head, pair)
                weight = plgpu.load(weights_ref.at[of_head, KIND_OF_PART[part], of_pair])
                if part in _TOKENS_PARTS:
                    weight = weight + plgpu.load(tokens_ref.at[head])[:, None]
                products = products + (of_query[part] * weight)[:, None, :] * keys[part][None]
            of_head, of_column = _grid(head, column)
            back = lax.div(length_ref[0] - t + token, jnp.int32(block))[:, None] - of_column
            bucket = sum(((back >= start).astype(jnp.int32) for start in BUCKETS[1:].tolist() if start < n), 0 * back)
            found = products.sum(2) + plgpu.load(distance_ref.at[of_head, bucket])
            found = found + jnp.where(of_column == 0, plgpu.load(sink_ref.at[head])[:, None], 0.0)
            found = jnp.where((back >= 0) & (back <= reach), found, -jnp.inf)
            plgpu.store(out_ref.at[_grid(token, column)[0], of_head, of_column], found)

        lax.fori_loop(0, -(-t * group // rows), some, None)

    def of_group(x: Any) -> tuple[Array, pl.BlockSpec]:
        x = jnp.asarray(x, jnp.float32)
        return x, pl.BlockSpec((group, *x.shape[1:]), lambda i, k, b: (k, *(0,) * (x.ndim - 1)))

    (out,) = triton_call(
        kernel,
        "hads_step_logits",
        (-(-n // tile), kv_heads, b),
        [
            (query, pl.BlockSpec((None, t, group, d), lambda i, k, b: (b, 0, k, 0))),
            (features, whole(None, None, *features.shape[2:])),
            *(of_group(x) for x in estimator),
            (lengths[:, None], whole(None, 1)),
        ],
        [((b, kv_heads, t, group, n), jnp.float32, whole(None, None, t, group, n))],
        num_warps=_LOGITS_WARPS,
    )
    return out


def _grid(rows: Int[Array, "r"], columns: Int[Array, "c"]) -> tuple[Int[Array, "r c"], Int[Array, "r c"]]:
    shape = rows.shape + columns.shape
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape)


# -- gains -----------------------------------------------------------------------------------------------------------


def gains(
    logits: Float[Array, "B K T group n"],
    sensitivity: Float[Array, "H"],
    burstiness: Float[Array, "H"],
    lengths: Int[Array, "B"],
    *,
    grid: CausalGrid,
    reach: int,
) -> Gains:
    b, kv_heads, t, group, n = logits.shape
    width, heads = _width(n), pl.next_power_of_2(group)
    together = min(heads, max(_TOGETHER // width, 1))

    def kernel(
        logits_ref: Any,
        sensitivity_ref: Any,
        burstiness_ref: Any,
        length_ref: Any,
        keys_ref: Any,
        in_order_ref: Any,
        order_ref: Any,
    ) -> None:
        omega = _of_heads(sensitivity_ref, 0, heads, group).sum()
        phi = (_of_heads(burstiness_ref, 0, heads, group) * (_of_heads(sensitivity_ref, 0, heads, group) / omega)).sum()
        mass = jnp.zeros((1, width), jnp.float32)
        for first in range(0, group, together):
            part = _of_heads(sensitivity_ref, first, together, group) / omega
            of_heads = _masses(logits_ref, first, together, width)
            mass = mass + (of_heads * part[:, None]).sum(0)[None, :]

        column = iota(width)[None, :]
        rows = [lax.div(length_ref[0] - t + token, jnp.int32(grid.block)) for token in range(t)]
        keys = _keys(mass, rows, column, grid, reach)
        keys_ref[...] = keys.reshape(width)
        in_order = sort_rows(keys)
        gain = gains_of_sorted(in_order, omega, phi)
        order = jnp.where(in_order < 0, 0, lax.bitcast_convert_type(gain, jnp.int32) + 1)
        in_order_ref[...] = in_order.reshape(width)
        order_ref[...] = order.reshape(width)

    def of_group(x: Any) -> tuple[Array, pl.BlockSpec]:
        return jnp.asarray(x, jnp.float32), pl.BlockSpec((group,), lambda k, b: (k,))

    row = ((b, kv_heads, width), jnp.int32, whole(None, None, width))
    return Gains(
        *triton_call(
            kernel,
            "hads_step_gains",
            (kv_heads, b),
            [
                (logits, whole(None, None, t, group, n)),
                of_group(sensitivity),
                of_group(burstiness),
                (lengths[:, None], whole(None, 1)),
            ],
            [row] * 3,
            num_warps=_GAINS_WARPS,
        )
    )


def _of_heads(ref: Any, first: int, number: int, group: int) -> Float[Array, "{number}"]:
    """A number per head, 0 past the group's last head."""
    head = first + iota(number)
    return jnp.where(head < group, plgpu.load(ref.at[jnp.minimum(head, group - 1)]), 0.0)


def _masses(logits_ref: Any, first: int, number: int, width: int) -> Float[Array, "{number} {width}"]:
    """The root of the mean square over the tokens of the masses of some heads (`step._mass`)."""
    t, group, n = logits_ref.shape
    head = jnp.broadcast_to(jnp.minimum(first + iota(number), group - 1)[:, None], (number, width))
    column = jnp.broadcast_to(iota(width)[None, :], (number, width))

    def of_token(token: Any) -> Array:
        x = plgpu.load(logits_ref.at[token, head, column], mask=column < n, other=-jnp.inf)
        x = jnp.exp(x - x.max(1)[:, None])
        return x / x.sum(1)[:, None]

    if t == 1:
        return of_token(0)

    def add(token: Array, total: Array) -> Array:
        mass = of_token(token)
        return total + mass * mass

    root = jnp.sqrt(lax.fori_loop(0, t, add, jnp.zeros((number, width), jnp.float32)) / t)
    return root / root.sum(1)[:, None]


def _keys(mass: Array, rows: list[Array], column: Array, grid: CausalGrid, reach: int) -> Int[Array, "1 width"]:
    """Keys of the blocks for tokens in these rows of blocks: what one token's rule forces is forced for all."""
    keys = key_of(mass, rows[-1], column, grid)
    seen, forced = column < 0, column < 0
    for row in rows:
        sees = (row - column >= 0) & (row - column <= reach)
        seen, forced = seen | sees, forced | (grid.rule.forces(row, column) & sees)
    keys = jnp.where(forced & (keys < FORCED), keys + FORCED, keys)
    return jnp.where(seen, keys, -1)


# -- lists -----------------------------------------------------------------------------------------------------------


def lists(
    gains: Gains,
    counts: Int[np.ndarray, "n_and_one"],
    lengths: Int[Array, "B"],
    *,
    tokens: int,
    block: int,
    reach: int,
    room: int,
) -> tuple[Int[Array, "B K capacity"], Int[Array, "B K 2"]]:
    """(columns of each head's blocks, rising, the last one repeated to the end; row_ptr).

    A sequence keeps `counts[its blocks]` blocks over all KV heads, but at most `room`. Among equal gains, later
    heads come first, and in a head the larger keys.
    """
    b, kv_heads, width = gains.keys.shape
    n = len(counts) - 1
    capacity = min(room, n)
    every = pl.next_power_of_2(kv_heads) * width
    bits = 4 if every <= 2048 else 2 if every <= 8192 else 1  # a pass holds 2 ** bits comparisons in registers

    def kernel(
        keys_ref: Any, in_order_ref: Any, order_ref: Any, counts_ref: Any, length_ref: Any, out_ref: Any, ptr_ref: Any
    ) -> None:
        own = pl.program_id(0)
        inside = jnp.minimum(blocks_inside(length_ref[0], tokens, block, reach), n)
        wanted = jnp.minimum(counts_ref[inside], room)
        head, place = lax.div(iota(every), jnp.int32(width)), lax.rem(iota(every), jnp.int32(width))
        order = plgpu.load(order_ref.at[head, place], mask=head < kv_heads, other=0)
        cut = _largest_cut(order, wanted, bits)
        above, equal = order > cut, (order == cut) & (order > 0)
        left = wanted - _sum(above) - _sum(equal & (head > own))
        mine = head == own
        kept = _sum(above & mine) + jnp.clip(left, 0, _sum(equal & mine))

        column = iota(width)
        last = in_order_ref[width - jnp.maximum(kept, 1)]
        chosen = (keys_ref[...] >= last) & (kept > 0)
        before = jnp.cumsum(chosen.astype(jnp.int32), 0)
        # Blocks that are not chosen go behind the others, where the last chosen one is repeated.
        slot = jnp.where(chosen, before - 1, kept + column - before)
        value = jnp.where(chosen, column, jnp.where(chosen, column, 0).max())
        plgpu.store(out_ref.at[slot], value, mask=slot < capacity)
        plgpu.store(ptr_ref.at[iota(2)], iota(2) * kept)

    row, table = whole(None, None, width), jnp.asarray(counts)
    columns, row_ptr = triton_call(
        kernel,
        "hads_step_lists",
        (kv_heads, b),
        [
            (gains.keys, row),
            (gains.in_order, row),
            (gains.order, pl.BlockSpec((None, kv_heads, width), lambda k, b: (b, 0, 0))),
            (table, pl.BlockSpec(table.shape, lambda k, b: (0,))),
            (lengths[:, None], whole(None, 1)),
        ],
        [
            ((b, kv_heads, capacity), jnp.int32, whole(None, None, capacity)),
            ((b, kv_heads, 2), jnp.int32, whole(None, None, 2)),
        ],
        num_warps=min(max(every // 1024, 4), 16),
    )
    return columns, row_ptr


def _largest_cut(order: Int[Array, "every"], wanted: Array, bits: int) -> Int[Array, ""]:
    """The largest number that at least `wanted` entries reach, `bits` at a time; 0 if there are fewer."""
    passes = -(-31 // bits)

    def step(number: Array, cut: Array) -> Array:
        shift = (passes - 1 - number) * bits
        if bits == 1:
            larger = cut + (jnp.int32(1) << shift)
            return jnp.where(_sum(order >= larger) >= wanted, larger, cut)
        cuts = cut + (iota(1 << bits) << shift)
        reach = (order[:, None] >= cuts[None, :]).astype(jnp.int32).sum(0)
        # The highest digits of the first pass are more than 31 bits: negative.
        return cut + (_sum((reach >= wanted) & (cuts > cut)) << shift)

    return lax.fori_loop(0, passes, step, jnp.int32(0))


def _sum(x: Array) -> Int[Array, ""]:
    return x.astype(jnp.int32).sum()
