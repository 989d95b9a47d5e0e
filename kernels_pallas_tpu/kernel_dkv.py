"""The dK/dV kernel: a grid step owns a tile of keys and walks the queries of one head. The query heads of a K/V head
follow one another and add to the same accumulators.

Tiles are transposed, with keys on the sublanes: dV = P dO and dK = dS Q are then plain products, and the statistics of
queries lie on the lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from xsake.backend.contract import Call
from xsake.kernels_pallas_tpu.config import Tiling, dkv_axes
from xsake.kernels_pallas_tpu.launch import Refs, grid_places, launch, listed_elements
from xsake.kernels_pallas_tpu.tile.bias import BiasTiles
from xsake.kernels_pallas_tpu.tile.bits import BitTiles
from xsake.kernels_pallas_tpu.tile.element import (
    NOTHING,
    Pair,
    Rule,
    Tokens,
    cut_lanes,
    dot,
    lane_index,
    mark_dead,
    read_lanes,
    row_index,
    row_statistics,
)
from xsake.kernels_pallas_tpu.tile.tiles import LANES
from xsake.kernels_pallas_tpu.walk import Chunks, Walk
from xsake.kernels_pallas_tpu.work import lists_and_records


def dkv(
    call: Call,
    tiling: Tiling,
    lse: Float[Array, "B H T"],
    delta: Float[Array, "B H T"],
    d_out: Float[Array, "B T H Dv"],
) -> tuple[Float[Array, "B S K D"], Float[Array, "B S K Dv"]]:
    q, kv = dkv_axes(call, tiling)
    mask, rule, exact = call.mask, Rule.of(call, q, kv), call.query.dtype == jnp.float32
    group = call.q_heads // call.kv_heads
    grid = (call.batch, call.kv_heads, kv.tiles, group)
    b, k, j, g = grid_places(*grid)
    work = lists_and_records(
        jnp.asarray(mask.q_indices),
        jnp.asarray(mask.q_row_ptr),
        jnp.asarray(mask.q_num_full),
        mask.q_bitmap,
        rows=kv,
        columns=q,
        steps=(b * mask.batch // call.batch, (k * group + g) * mask.heads // call.q_heads, j),
    )
    pair = Pair("query", "d_out")
    bias = None if call.bias is None else BiasTiles(call.bias, kv, q, 1, transposed=True)
    bits = None if mask.bitmaps is None else BitTiles(call, kv, q, transposed=True)

    def body(refs: Refs, walk: Walk, ids: list[Array], after: list[Array]) -> None:
        dk, dv = refs.dk_acc, refs.dv_acc

        @pl.when(ids[3] == 0)
        def _():
            dk[...] = jnp.zeros_like(dk)
            dv[...] = jnp.zeros_like(dv)

        def kv_vectors() -> Tokens:
            return rule.kv_vectors(
                lambda axis, fill: row_index(axis, ids[2], 1, fill), lambda r: refs.kv_tokens[0, 0, r][:, :1]
            )

        def q_vectors(slot: Array, position: Array, count: int) -> Tokens:
            at = [position + e for e in range(count)]
            live = [walk.live(p) for p in at]
            tokens = rule.q_vectors(
                lambda axis, fill: lane_index(axis, [walk.tile(p) for p in at], live, fill),
                lambda r: read_lanes(refs.q_tokens_buffer, slot, r, 0, count * q.tile),
            )
            return tokens._replace(upper=mark_dead(tokens.upper, live, NOTHING)) if rule.positions else tokens

        def compute(slot: Array, position: Array, count: int, tested: bool) -> None:
            tokens = q_vectors(slot, position, count) if tested else Tokens()
            for first, width in tiling.passes(count):
                query = pair.read(refs, False, slot, first, width)
                product = dot(refs.key[...].reshape(kv.tile, -1), query, (1, 1), exact)
                added = None
                if bias is not None:
                    added = bias.read(refs.bias_buffer, slot, first // q.tile, first % q.tile, width)
                x, slope = rule.logits(product, added)
                if tested:
                    ok = rule.attends(cut_lanes(tokens, first, width), kv_vectors())
                    if bits is not None:
                        ok &= bits.read(refs.bits_buffer, slot, first, width)
                    x, slope = rule.masked(x, slope, ok)
                p = rule.exp(x - read_lanes(refs.statistics_buffer, slot, 0, first, width))
                # dV
                do = pair.read(refs, True, slot, first, width)
                dv[...] += dot(p.astype(do.dtype), do, (1, 0), exact)
                # dK
                dp = dot(refs.value[...].reshape(kv.tile, -1), do, (1, 1), exact)
                ds = p * (dp - read_lanes(refs.statistics_buffer, slot, 1, first, width))
                if slope is not None:
                    ds = ds * slope
                dk[...] += dot(ds.astype(query.dtype), query, (1, 0), exact)

        walk.run(tuple(ids), tuple(after), compute)

        @pl.when(ids[3] == group - 1)
        def _():
            refs.dk[...] = (dk[...] * call.scale).astype(refs.dk.dtype).reshape(refs.dk.shape)
            refs.dv[...] = dv[...].astype(refs.dv.dtype).reshape(refs.dv.shape)

    own = lambda *shape: pl.BlockSpec((1, 1, 1, *shape), lambda b, k, j, g: (b, k, j, *(0,) * len(shape)))  # noqa: E731
    kv_tokens = None
    if rule.kv_rows:
        x = rule.kv_tokens(call)
        x = jnp.broadcast_to(x[..., None], (*x.shape, LANES))
        kv_tokens = (x, pl.BlockSpec((1, 1, rule.kv_rows, kv.tile, LANES), lambda b, k, j, g: (b, j, 0, 0, 0)))
    shape = (call.batch, call.kv_heads, kv.tiles, kv.tile)
    dk, dv = launch(
        body,
        name="xsake_dkv",
        call=call,
        grid=grid,
        work=work,
        chunks=Chunks(tiling.wide, tiling.narrow, q.split, call.full_is_exact, tiling.mixed),
        inputs={
            "key": (kv.cut_heads(call.key), own(kv.tile, call.head_dim)),
            "value": (kv.cut_heads(call.value), own(kv.tile, call.value_dim)),
            "kv_tokens": kv_tokens,
        },
        streams={
            **pair.streams(
                q.cut_heads(call.query), q.cut_heads(d_out), lambda ref, at, t, n: ref.at[at[0], _head(group, at), t]
            ),
            **_streams(call, rule, bias, bits, row_statistics(rule, lse, delta)),
        },
        outputs={
            "dk": ((*shape, call.head_dim), call.key.dtype, own(kv.tile, call.head_dim)),
            "dv": ((*shape, call.value_dim), call.value.dtype, own(kv.tile, call.value_dim)),
        },
        scratch={
            "dk_acc": pltpu.VMEM((kv.tile, call.head_dim), jnp.float32),
            "dv_acc": pltpu.VMEM((kv.tile, call.value_dim), jnp.float32),
        },
        flops=4 * listed_elements(call) * (call.head_dim + call.value_dim),
    )
    return kv.uncut_heads(dk), kv.uncut_heads(dv)


def _head(group: int, at: Sequence[Any]) -> Any:
    """The query head of a grid step."""
    return at[1] * group + at[3]


def _streams(
    call: Call, rule: Rule, bias: BiasTiles | None, bits: BitTiles | None, statistics: Array
) -> dict[str, tuple[Array, Callable] | None]:
    """The numbers per query and per element that are streamed beside queries and dO."""
    head = partial(_head, call.q_heads // call.kv_heads)
    streams: dict[str, tuple[Array, Callable] | None] = {
        "statistics": (statistics, lambda ref, at, t, n: ref.at[at[0], head(at), t]),
        "q_tokens": (rule.q_tokens(call), lambda ref, at, t, n: ref.at[at[0], t]) if rule.q_rows else None,
        "bias": None,
        "bits": None,
    }
    if bias is not None:
        streams["bias"] = (bias.tiles, lambda ref, at, t, n: ref.at[bias.pick(at[0], head(at), at[2], t)])
    if bits is not None:
        streams["bits"] = (bits.tiles, lambda ref, at, t, n: ref.at[bits.pick(at[0], head(at), at[2], t, n[0])])
    return streams
