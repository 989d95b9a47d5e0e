"""The forward of the Triton backend: a program per tile of queries walks its mask row with an online softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float

from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu.triton.tiles import NEG_INF, Refs, Tiles, Tiling, dot, int_div, iota, padded_dim, queries


def forward(call: Call, tiling: Tiling) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
    tiles = Tiles(call, tiling)
    inputs = row_inputs(call, tiles)
    if call.sink_lse is not None:
        batch = call.sink_lse.shape[0]
        spec = pl.BlockSpec((None, None), lambda i, h, b: (b if batch > 1 else 0, h))
        inputs["sink"] = (call.sink_lse.astype(jnp.float32), spec)
    out = tiles.run(
        lambda refs, outs: _kernel(tiles, refs, outs),
        "xsake_triton_forward",
        (tiles.num_q, call.q_heads, call.batch),
        inputs,
        {
            "out": (
                (call.batch, call.q_len, call.q_heads, call.value_dim),
                call.query.dtype,
                head_rows(call.q_len, call.value_dim),
            ),
            "lse": ((call.batch, call.q_heads, call.q_len), jnp.float32, head_vector(call.q_len)),
        },
    )
    return out["out"], out["lse"]


def _kernel(tiles: Tiles, refs: Refs, outs: Refs) -> None:
    row, first_q = q_tile_of(tiles, refs)
    units = tiles.units
    q = tiles.load(refs["query"].at[pl.ds(first_q, tiles.tq), :], first_q, tiles.tq, tiles.q_len, tiles.head_dim)
    q_tokens = tiles.q_tokens(refs, first_q, axis=0)

    def body(tested: bool) -> Callable:
        end = tiles.kv_len if tested and tiles.kv_tail else None

        def step(first_kv: Array, slot: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            peak, total, acc = state
            here = (pl.ds(tiles.place(refs, first_kv), tiles.tkv), slice(None))
            # QK
            k = tiles.load(refs["key"].at[here], first_kv, tiles.tkv, end, tiles.head_dim)
            bias = None
            if "bias" in refs:
                bias = tiles.bias_tile(
                    lambda i, j: refs["bias"].at[i, j], first_q, first_kv, masked=tested or tiles.q_tail
                )
            x, c, _ = tiles.logits(dot(q, k, (1, 1)), bias)
            if tested:
                bits = row_bits(tiles, refs, slot, first_q, first_kv)
                x = jnp.where(tiles.attends(q_tokens, tiles.kv_tokens(refs, first_kv, axis=1), bits), x, NEG_INF)
            # Softmax
            new_peak = jnp.maximum(peak, x.max(1) * c)
            safe = new_peak
            if tested or bias is not None:  # a row may have attended nothing yet
                safe = jnp.where(new_peak == NEG_INF, 0.0, new_peak)
            decay = units.exp(peak - safe)
            p = units.exp(x * c - safe[:, None])
            total = total * decay + p.sum(1)
            # PV
            but = tiles.padding(refs, first_kv)
            v = tiles.load(refs["value"].at[here], first_kv, tiles.tkv, end, tiles.value_dim, but=but)
            acc = acc * decay[:, None] + dot(p.astype(v.dtype), v)
            return new_peak, total, acc

        return step

    state = (
        jnp.full((tiles.tq,), NEG_INF, jnp.float32),
        jnp.zeros((tiles.tq,), jnp.float32),
        jnp.zeros((tiles.tq, padded_dim(tiles.value_dim)), jnp.float32),
    )
    peak, total, acc = walk_kv(tiles, refs, row, first_q, body, state)

    if "sink" in refs:
        sink = plgpu.load(refs["sink"]) * units.one
        top = jnp.where(sink > peak, sink, peak)
        safe = jnp.where(top == NEG_INF, 0.0, top)
        decay = units.exp(peak - safe)
        total = total * decay + units.exp(sink - safe)  # a NaN sink makes the whole row NaN
        acc, peak = acc * decay[:, None], top
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, NEG_INF, (peak + units.log(total)) * (1 / units.one))
    store_rows(outs["out"], acc / total[:, None], first_q, tiles.q_len, tiles.value_dim)
    plgpu.store(outs["lse"].at[pl.ds(first_q, tiles.tq)], lse, mask=first_q + iota(tiles.tq) < tiles.q_len)


# -- what every kernel that owns a tile of queries shares --------------------------------------------------------


def head_rows(length: int, dim: int, group: int = 1) -> pl.BlockSpec:
    """One query head of [B, T, H, X] for the grid (tiles, H, B), or the KV head that `group` query heads share."""
    return pl.BlockSpec((None, length, None, padded_dim(dim)), lambda i, h, b: (b, 0, int_div(h, group), 0))


def head_vector(length: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, length), lambda i, h, b: (b, h, 0))


def _token_vector(length: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, length), lambda i, h, b: (b, 0))


def row_inputs(call: Call, tiles: Tiles) -> dict[str, tuple[Any, pl.BlockSpec]]:
    """The inputs that the forward and dQ share: arrays and lists for the grid (query tiles, H, B)."""
    mask, heads_per_list = call.mask, call.q_heads // call.mask.heads

    def lists(x: Array | np.ndarray) -> tuple[Array | np.ndarray, pl.BlockSpec]:
        return x, pl.BlockSpec(
            (None, None, x.shape[2]), lambda i, h, b: (b if tiles.mask_batch > 1 else 0, int_div(h, heads_per_list), 0)
        )

    inputs = {
        "query": (queries(call), head_rows(call.q_len, call.head_dim)),
        "key": (call.key, head_rows(call.kv_len, call.head_dim, tiles.group)),
        "value": (call.value, head_rows(call.kv_len, call.value_dim, tiles.group)),
        "indices": lists(mask.kv_indices),
        "row_ptr": lists(mask.kv_row_ptr),
        "num_full": lists(mask.kv_num_full),
    }
    if call.page_table is not None:
        inputs |= {
            "key": _all_pages(call, value=False),
            "value": _all_pages(call, value=True),
            "page_table": (call.page_table, _token_vector(call.page_table.shape[1])),
        }
    if mask.row_order is not None:
        inputs["order"] = lists(mask.row_order)
    if mask.bitmaps is not None:
        b1, h1 = mask.bitmaps.shape[0] > 1, mask.bitmaps.shape[1] > 1
        inputs["bitmap"] = lists(mask.kv_bitmap)
        inputs["bitmaps"] = (
            lax.bitcast_convert_type(mask.bitmaps, jnp.int32),
            pl.BlockSpec(
                (None, None, *mask.bitmaps.shape[2:]),
                lambda i, h, b: (b if b1 else 0, int_div(h, heads_per_list) if h1 else 0, 0, 0, 0),
            ),
        )
    if call.bias is not None:
        bias_b, bias_h = call.bias.shape[0] > 1, call.bias.shape[1] > 1
        inputs["bias"] = (
            call.bias,
            pl.BlockSpec(
                (None, None, *call.bias.shape[2:]), lambda i, h, b: (b if bias_b else 0, h if bias_h else 0, 0, 0)
            ),
        )
    inputs |= token_inputs(call)
    return inputs


def _all_pages(call: Call, *, value: bool) -> tuple[Array, pl.BlockSpec]:
    x, group = call.value if value else call.key, call.q_heads // call.kv_heads
    pages, page, heads, dim = x.shape
    spec = pl.BlockSpec(
        (pages * page, None, padded_dim(dim)),
        lambda i, h, b: (0, call.stored_head(int_div(h, group), value=value), 0),
    )
    return x.reshape(pages * page, heads, dim), spec


def token_inputs(call: Call) -> dict[str, tuple[Any, pl.BlockSpec]]:
    names = ("q_segments", "kv_segments", "q_positions", "kv_positions")
    present = {name: getattr(call, name) for name in names if getattr(call, name) is not None}
    return {name: (x, _token_vector(x.shape[1])) for name, x in present.items()}


def q_tile_of(tiles: Tiles, refs: Refs) -> tuple[Array, Array]:
    """(mask row, first query) of this program; the first programs take the longest rows."""
    i = pl.program_id(0)
    rank = int_div(i, tiles.split_q)
    row = refs["order"][rank] if "order" in refs else rank
    return row, (row * tiles.split_q + (i - rank * tiles.split_q)) * tiles.tq


def row_bits(tiles: Tiles, refs: Refs, slot: Array, first_q: Array, first_kv: Array) -> Array | None:
    if "bitmaps" not in refs:
        return None
    number = refs["bitmap"][slot]
    return tiles.bits(lambda column, word: refs["bitmaps"].at[number, column, word], first_q, first_kv, axis=0)


def walk_kv(tiles: Tiles, refs: Refs, row: Array, first_q: Array, body: Callable, carry: Any) -> Any:
    bounds = tiles.bounds(lambda r: refs["row_ptr"][r], lambda r: refs["num_full"][r], row, first_q < tiles.q_len)
    trivial = tiles.untested and not tiles.kv_tail
    return tiles.walk_row(bounds, lambda n: refs["indices"][n], tiles.split_kv, tiles.tkv, trivial, body, carry)


def store_rows(ref: Any, values: Array, first: Array, length: int, dim: int) -> None:
    rows, width = values.shape
    mask = jnp.broadcast_to((first + iota(rows) < length)[:, None], (rows, width))
    if width != dim:
        mask &= jnp.broadcast_to((iota(width) < dim)[None, :], (rows, width))
    plgpu.store(ref.at[pl.ds(first, rows), :], values.astype(ref.dtype), mask=mask)
