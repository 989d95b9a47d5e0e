"""The backward of the Triton backend, without atomics: one program adds up each sum in a fixed order, so that two runs
give the same bits.

A program of dQ walks a row of the lists. A program of dK/dV walks a column, for every query head of a group. A bias
[B|1, H|1, T, S] has a kernel of its own, with one program per tile; the gradient of a bias that is broadcast over keys
comes with dQ (row sums), and over queries with dK/dV (column sums).
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float

from xsake._ground.trace import vary, varying_axes
from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu.triton.forward import (
    head_rows,
    head_vector,
    q_tile_of,
    row_bits,
    row_inputs,
    store_rows,
    token_inputs,
    walk_kv,
)
from xsake.kernels_pallas_gpu.triton.tiles import (
    NEG_INF,
    Refs,
    Tiles,
    Tiling,
    dot,
    int_div,
    iota,
    padded_dim,
    queries,
    repeat,
    units_of,
    zero,
)

POS_INF = float("inf")


def backward(
    call: Call,
    lse: Float[Array, "B H T"],
    delta: Float[Array, "B H T"],
    d_out: Float[Array, "B T H Dv"],
    *,
    dq_tiling: Tiling,
    dkv_tiling: Tiling,
    with_bias: bool,
) -> tuple[Array, Array, Array, Array | None]:
    # A row that attends nothing gets lse = +inf: its weights are exp(-inf) = 0.
    lse = jnp.where(lse == NEG_INF, POS_INF, lse * units_of(call.query.dtype).one)
    one_q, one_kv = (call.bias.shape[2] == 1, call.bias.shape[3] == 1) if with_bias else (False, False)
    if with_bias and call.mask.bitmaps is not None and not one_q and not one_kv:
        with_bias = False  # its kernel knows no bitmaps: the operation computes this gradient
    dq, row_sums = _dq(call, dq_tiling, lse, delta, d_out, with_sums=one_kv)
    dk, dv, column_sums = _dkv(call, dkv_tiling, lse, delta, d_out, with_sums=one_q and not one_kv)
    d_bias = None
    if with_bias:
        if one_kv:
            d_bias = row_sums[..., None]
            d_bias = d_bias.sum(2, keepdims=True) if one_q else d_bias
        elif one_q:
            d_bias = column_sums[:, :, None, :]
        else:
            d_bias = _full_bias(call, dq_tiling, lse, delta, d_out)
        reduced = tuple(axis for axis in (0, 1) if d_bias.shape[axis] != call.bias.shape[axis])
        d_bias = d_bias.sum(reduced, keepdims=True).astype(call.bias.dtype)
    return dq, dk, dv, d_bias


def _gradient_of_logits(
    tiles: Tiles, products: Array, d_p: Array, bias: Array | None, ok: Array | None, lse: Array, delta: Array
):
    """p = exp(logits - lse) and ds = p * (d_p - delta) * soft_cap' of a tile; `lse` and `delta` broadcast over keys."""
    x, c, slope = tiles.logits(products, bias)
    if ok is not None:
        x = jnp.where(ok, x, NEG_INF)
        if slope is not None and bias is not None:
            slope = jnp.where(ok, slope, 0.0)  # the slope at a NaN bias is NaN
    p = tiles.units.exp(x * c - lse)
    ds = p * (d_p - delta)
    return p, ds if slope is None else ds * slope


# -- dQ ----------------------------------------------------------------------------------------------------------


def _dq(
    call: Call, tiling: Tiling, lse: Array, delta: Array, d_out: Array, *, with_sums: bool
) -> tuple[Array, Array | None]:
    tiles = Tiles(call, tiling)
    inputs = row_inputs(call, tiles)
    inputs["d_out"] = (d_out, head_rows(call.q_len, call.value_dim))
    inputs["lse"] = (lse, head_vector(call.q_len))
    inputs["delta"] = (delta, head_vector(call.q_len))
    outputs = {"dq": (call.query.shape, call.query.dtype, head_rows(call.q_len, call.head_dim))}
    if with_sums:
        outputs["sums"] = (lse.shape, jnp.float32, head_vector(call.q_len))
    grid = (tiles.num_q, call.q_heads, call.batch)
    out = tiles.run(lambda refs, outs: _dq_kernel(tiles, refs, outs), "xsake_triton_dq", grid, inputs, outputs)
    return out["dq"], out.get("sums")


def _dq_kernel(tiles: Tiles, refs: Refs, outs: Refs) -> None:
    row, first_q = q_tile_of(tiles, refs)
    rows, vector = (pl.ds(first_q, tiles.tq), slice(None)), (pl.ds(first_q, tiles.tq),)
    q = tiles.load(refs["query"].at[rows], first_q, tiles.tq, tiles.q_len, tiles.head_dim)
    d_out = tiles.load(refs["d_out"].at[rows], first_q, tiles.tq, tiles.q_len, tiles.value_dim)
    lse = tiles.tokens(refs["lse"].at[vector], first_q, tiles.tq, tiles.q_len, POS_INF)[:, None]
    delta = tiles.tokens(refs["delta"].at[vector], first_q, tiles.tq, tiles.q_len, 0.0)[:, None]
    q_tokens = tiles.q_tokens(refs, first_q, axis=0)

    def body(tested: bool) -> Callable:
        end = tiles.kv_len if tested and tiles.kv_tail else None

        def step(first_kv: Array, slot: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            here = (pl.ds(first_kv, tiles.tkv), slice(None))
            k = tiles.load(refs["key"].at[here], first_kv, tiles.tkv, end, tiles.head_dim)
            v = tiles.load(refs["value"].at[here], first_kv, tiles.tkv, end, tiles.value_dim)
            bias = ok = None
            if "bias" in refs:
                bias = tiles.bias_tile(
                    lambda i, j: refs["bias"].at[i, j], first_q, first_kv, masked=tested or tiles.q_tail
                )
            if tested:
                bits = row_bits(tiles, refs, slot, first_q, first_kv)
                ok = tiles.attends(q_tokens, tiles.kv_tokens(refs, first_kv, axis=1), bits)
            _, ds = _gradient_of_logits(tiles, dot(q, k, (1, 1)), dot(d_out, v, (1, 1)), bias, ok, lse, delta)
            acc, *sums = state
            return acc + dot(ds.astype(k.dtype), k), *(s + ds.sum(1) for s in sums)

        return step

    start = [jnp.zeros((tiles.tq, padded_dim(tiles.head_dim)), jnp.float32)]
    if "sums" in outs:
        start.append(jnp.zeros((tiles.tq,), jnp.float32))
    acc, *sums = walk_kv(tiles, refs, row, first_q, body, tuple(start))
    store_rows(outs["dq"], acc * tiles.scale, first_q, tiles.q_len, tiles.head_dim)
    if sums:
        plgpu.store(outs["sums"].at[vector], sums[0], mask=first_q + iota(tiles.tq) < tiles.q_len)


# -- dK and dV ---------------------------------------------------------------------------------------------------


def _dkv(
    call: Call, tiling: Tiling, lse: Array, delta: Array, d_out: Array, *, with_sums: bool
) -> tuple[Array, Array, Array | None]:
    """Grid (KV tiles, K, B). A program sees all query heads of a KV head, and their lists or their one list."""
    tiles, mask, group = Tiles(call, tiling), call.mask, call.q_heads // call.kv_heads
    list_group = group if mask.heads == call.q_heads else 1
    kv_heads_per_list = call.kv_heads * list_group // mask.heads

    def lists(x: Array) -> tuple[Array, pl.BlockSpec]:
        return x, pl.BlockSpec(
            (None, list_group, x.shape[2]),
            lambda i, k, b: (b if tiles.mask_batch > 1 else 0, int_div(k, kv_heads_per_list), 0),
        )

    def group_rows(dim: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, call.q_len, group, padded_dim(dim)), lambda i, k, b: (b, 0, k, 0))

    def group_vector(length: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, group, length), lambda i, k, b: (b, k, 0))

    inputs = {
        "query": (queries(call), group_rows(call.head_dim)),
        "d_out": (d_out, group_rows(call.value_dim)),
        "lse": (lse, group_vector(call.q_len)),
        "delta": (delta, group_vector(call.q_len)),
        "key": (call.key, head_rows(call.kv_len, call.head_dim)),
        "value": (call.value, head_rows(call.kv_len, call.value_dim)),
        "indices": lists(mask.q_indices),
        "row_ptr": lists(mask.q_row_ptr),
        "num_full": lists(mask.q_num_full),
    }
    if mask.col_order is not None:
        inputs["order"] = lists(mask.col_order)
    if mask.bitmaps is not None:
        table_b, table_h = mask.bitmaps.shape[0] > 1, mask.bitmaps.shape[1] > 1
        inputs["bitmap"] = lists(mask.q_bitmap)
        inputs["bitmaps"] = (
            lax.bitcast_convert_type(mask.bitmaps, jnp.int32),
            pl.BlockSpec(
                (None, list_group if table_h else 1, *mask.bitmaps.shape[2:]),
                lambda i, k, b: (b if table_b else 0, int_div(k, kv_heads_per_list) if table_h else 0, 0, 0, 0),
            ),
        )
    if call.bias is not None:
        b1, h1 = call.bias.shape[0] > 1, call.bias.shape[1] > 1
        inputs["bias"] = (
            call.bias,
            pl.BlockSpec(
                (None, group if h1 else 1, *call.bias.shape[2:]), lambda i, k, b: (b if b1 else 0, k if h1 else 0, 0, 0)
            ),
        )
    inputs |= token_inputs(call)
    outputs = {
        "dk": (call.key.shape, call.key.dtype, head_rows(call.kv_len, call.head_dim)),
        "dv": (call.value.shape, call.value.dtype, head_rows(call.kv_len, call.value_dim)),
    }
    if with_sums:
        outputs["sums"] = ((call.batch, call.q_heads, call.kv_len), jnp.float32, group_vector(call.kv_len))
    out = tiles.run(
        lambda refs, outs: _dkv_kernel(tiles, list_group > 1, refs, outs),
        "xsake_triton_dkv",
        (tiles.num_kv, call.kv_heads, call.batch),
        inputs,
        outputs,
    )
    return out["dk"], out["dv"], out.get("sums")


def _dkv_kernel(tiles: Tiles, lists_differ: bool, refs: Refs, outs: Refs) -> None:
    i = pl.program_id(0)
    rank = int_div(i, tiles.split_kv)
    column = refs["order"][0, rank] if "order" in refs else rank
    first_kv = (column * tiles.split_kv + (i - rank * tiles.split_kv)) * tiles.tkv
    rows, vector = (pl.ds(first_kv, tiles.tkv), slice(None)), pl.ds(first_kv, tiles.tkv)
    k = tiles.load(refs["key"].at[rows], first_kv, tiles.tkv, tiles.kv_len, tiles.head_dim)
    v = tiles.load(refs["value"].at[rows], first_kv, tiles.tkv, tiles.kv_len, tiles.value_dim)
    kv_tokens = tiles.kv_tokens(refs, first_kv, axis=0)
    # Rows past the last query have no weight, but a bias of NaN for keys that they alone attend would reach dK.
    rows_share_bias = "bias" in refs and tiles.bias_shape[2] == 1 and tiles.q_tail

    def of_head(g: Array | int, d_kv: tuple[Array, Array]) -> tuple[Array, Array]:
        list_g = g if lists_differ else zero(g)
        bias_g = g if "bias" in refs and tiles.bias_shape[1] > 1 else zero(g)

        # Tiles are transposed, keys by queries, so that p and ds are left operands as they come.
        def body(tested: bool) -> Callable:
            end = tiles.q_len if tested and tiles.q_tail else None

            def step(first_q: Array, slot: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
                dk, dv, *sums = state
                here = (pl.ds(first_q, tiles.tq), g, slice(None))
                q = tiles.load(refs["query"].at[here], first_q, tiles.tq, end, tiles.head_dim)
                d_out = tiles.load(refs["d_out"].at[here], first_q, tiles.tq, end, tiles.value_dim)
                along = (g, pl.ds(first_q, tiles.tq))
                lse = tiles.tokens(refs["lse"].at[along], first_q, tiles.tq, tiles.q_len, POS_INF)[None, :]
                delta = tiles.tokens(refs["delta"].at[along], first_q, tiles.tq, tiles.q_len, 0.0)[None, :]
                bias = ok = None
                if "bias" in refs:
                    bias = tiles.bias_tile(
                        lambda i, j: refs["bias"].at[bias_g, i, j], first_q, first_kv, masked=tested or tiles.kv_tail
                    )
                    bias = bias.T if bias.ndim else bias
                if tested:
                    q_tokens = tiles.q_tokens(refs, first_q, axis=1)
                    bits = None
                    if "bitmaps" in refs:
                        owner = list_g if tiles.bitmaps[1] > 1 else zero(g)
                        own = (owner, refs["bitmap"][list_g, slot])
                        bits = tiles.bits(lambda *at: refs["bitmaps"].at[(*own, *at)], first_q, first_kv, axis=1)
                    ok = tiles.attends(q_tokens, kv_tokens, bits)
                    if ok is not None and rows_share_bias:
                        ok &= q_tokens.index < tiles.q_len
                p, ds = _gradient_of_logits(tiles, dot(k, q, (1, 1)), dot(v, d_out, (1, 1)), bias, ok, lse, delta)
                dv = dv + dot(p.astype(d_out.dtype), d_out)
                dk = dk + dot(ds.astype(q.dtype), q)
                return dk, dv, *(s + ds.sum(1) for s in sums)

            return step

        bounds = tiles.bounds(
            lambda r: refs["row_ptr"][list_g, r], lambda r: refs["num_full"][list_g, r], column, first_kv < tiles.kv_len
        )
        state = (*d_kv, jnp.zeros((tiles.tkv,), jnp.float32)) if "sums" in outs else d_kv
        trivial = tiles.untested and not tiles.q_tail and not tiles.kv_tail
        dk, dv, *sums = tiles.walk_row(
            bounds, lambda n: refs["indices"][list_g, n], tiles.split_q, tiles.tq, trivial, body, state
        )
        if sums:
            plgpu.store(outs["sums"].at[g, vector], sums[0], mask=first_kv + iota(tiles.tkv) < tiles.kv_len)
        return dk, dv

    d_kv = (
        jnp.zeros((tiles.tkv, padded_dim(tiles.head_dim)), jnp.float32),
        jnp.zeros((tiles.tkv, padded_dim(tiles.value_dim)), jnp.float32),
    )
    d_kv = repeat(tiles.group, of_head, d_kv, i)
    store_rows(outs["dk"], d_kv[0] * tiles.product_scale, first_kv, tiles.kv_len, tiles.head_dim)
    store_rows(outs["dv"], d_kv[1], first_kv, tiles.kv_len, tiles.value_dim)


# -- the gradient of a bias [B|1, H|1, T, S] ---------------------------------------------------------------------


def _full_bias(call: Call, tiling: Tiling, lse: Array, delta: Array, d_out: Array) -> Array:
    """One program per tile of the bias adds up the batch entries and heads that share the tile and list its block.

    The gradient is dense like the bias itself, so that one program per tile costs no more than writing the gradient.
    """
    tiles = Tiles(call, tiling)
    blocks = vary(jnp.asarray(call.mask.to_blocks()).astype(jnp.int32), varying_axes(call))

    def whole(x: Array, dim: int | None = None) -> tuple[Array, pl.BlockSpec]:
        shape = x.shape if dim is None else (*x.shape[:-1], padded_dim(dim))
        return x, pl.BlockSpec(shape, lambda *_: (0,) * len(shape))

    inputs = {
        "query": whole(queries(call), call.head_dim),
        "d_out": whole(d_out, call.value_dim),
        "key": whole(call.key, call.head_dim),
        "value": whole(call.value, call.value_dim),
        "lse": whole(lse),
        "delta": whole(delta),
        "blocks": whole(blocks),
    }
    tile_spec = pl.BlockSpec(
        (None, None, *call.bias.shape[2:]), lambda i, j, bh: (*_divmod(bh, call.bias.shape[1]), 0, 0)
    )
    inputs["bias"] = (call.bias, tile_spec)
    inputs |= {name: whole(x) for name, (x, _) in token_inputs(call).items()}
    grid = (tiles.num_q, tiles.num_kv, call.bias.shape[0] * call.bias.shape[1])
    out = tiles.run(
        lambda refs, outs: _full_bias_kernel(tiles, refs, outs),
        "xsake_triton_d_bias",
        grid,
        inputs,
        {"d_bias": (call.bias.shape, jnp.float32, tile_spec)},
    )
    return out["d_bias"]


def _divmod(n: Array, by: int) -> tuple[Array, Array]:
    quotient = int_div(n, by)
    return quotient, n - quotient * by


def _full_bias_kernel(tiles: Tiles, refs: Refs, outs: Refs) -> None:
    bias_batch, bias_heads = tiles.bias_shape[:2]
    i, j = pl.program_id(0), pl.program_id(1)
    own_batch, own_head = _divmod(pl.program_id(2), bias_heads)
    first_q, first_kv = i * tiles.tq, j * tiles.tkv
    shared_heads = tiles.q_heads // bias_heads
    bias = tiles.bias_tile(lambda r, c: refs["bias"].at[r, c], first_q, first_kv, masked=True)

    def add(b: Array, h: Array, acc: Array) -> Array:
        q_at, kv_at = pl.ds(first_q, tiles.tq), pl.ds(first_kv, tiles.tkv)
        kv_h = int_div(h, tiles.group)
        q = tiles.load(refs["query"].at[b, q_at, h, :], first_q, tiles.tq, tiles.q_len, tiles.head_dim)
        d_out = tiles.load(refs["d_out"].at[b, q_at, h, :], first_q, tiles.tq, tiles.q_len, tiles.value_dim)
        k = tiles.load(refs["key"].at[b, kv_at, kv_h, :], first_kv, tiles.tkv, tiles.kv_len, tiles.head_dim)
        v = tiles.load(refs["value"].at[b, kv_at, kv_h, :], first_kv, tiles.tkv, tiles.kv_len, tiles.value_dim)
        lse = tiles.tokens(refs["lse"].at[b, h, q_at], first_q, tiles.tq, tiles.q_len, POS_INF)[:, None]
        delta = tiles.tokens(refs["delta"].at[b, h, q_at], first_q, tiles.tq, tiles.q_len, 0.0)[:, None]
        here = {n: _Row(refs[n], b) for n in ("q_segments", "kv_segments", "q_positions", "kv_positions") if n in refs}
        ok = tiles.attends(tiles.q_tokens(here, first_q, axis=0), tiles.kv_tokens(here, first_kv, axis=1))
        return acc + _gradient_of_logits(tiles, dot(q, k, (1, 1)), dot(d_out, v, (1, 1)), bias, ok, lse, delta)[1]

    def step(n: Array, acc: Array) -> Array:
        b, h = _divmod(n, shared_heads)
        b, h = (own_batch if bias_batch > 1 else b), own_head * shared_heads + h
        mask_head = int_div(h, tiles.q_heads // tiles.mask_heads)
        block = (b if tiles.mask_batch > 1 else 0, mask_head, int_div(i, tiles.split_q), int_div(j, tiles.split_kv))
        return lax.cond(refs["blocks"][block] > 0, lambda a: add(b, h, a), lambda a: a, acc)

    count = (1 if bias_batch > 1 else tiles.batch) * shared_heads
    acc = repeat(count, step, jnp.zeros((tiles.tq, tiles.tkv), jnp.float32), i)
    inside = (first_q + iota(tiles.tq) < tiles.q_len)[:, None] & (first_kv + iota(tiles.tkv) < tiles.kv_len)[None, :]
    plgpu.store(outs["d_bias"].at[pl.ds(first_q, tiles.tq), pl.ds(first_kv, tiles.tkv)], acc, mask=inside)


class _Row:
    """One batch entry of a token array [B, L]."""

    def __init__(self, ref, b: Array):
        self._ref, self._b = ref, b

    @property
    def at(self) -> _Row:
        return self

    def __getitem__(self, index: tuple):
        return self._ref.at[(self._b, *index)]
