"""The dQ kernel: the steps and lists of the forward; p = exp(logits - lse) is computed again from the saved lse."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from xsake.backend.contract import Call
from xsake.kernels_pallas_tpu.config import Tiling, dq_axes
from xsake.kernels_pallas_tpu.launch import Refs, launch, listed_elements
from xsake.kernels_pallas_tpu.query_steps import QuerySteps
from xsake.kernels_pallas_tpu.tile.element import Rule, Tokens, dot, row_statistics, spread
from xsake.kernels_pallas_tpu.tile.tiles import LANES
from xsake.kernels_pallas_tpu.walk import Walk


def dq(
    call: Call,
    tiling: Tiling,
    lse: Float[Array, "B H T"],
    delta: Float[Array, "B H T"],
    d_out: Float[Array, "B T H Dv"],
) -> Float[Array, "B T H D"]:
    q, kv = dq_axes(call, tiling)
    rule, fold, exact = Rule.of(call, q, kv), tiling.fold, call.query.dtype == jnp.float32
    steps = QuerySteps(call, tiling, rule)
    rows = fold * q.tile

    def body(refs: Refs, walk: Walk, ids: list[Array], after: list[Array]) -> None:
        acc = refs.acc
        acc[...] = jnp.zeros_like(acc)
        for f in range(fold):
            part = slice(f * q.tile, (f + 1) * q.tile)
            refs.lse[part] = jnp.broadcast_to(refs.statistics[0, f, 0, 0:1], (LANES, q.tile)).T
            refs.delta[part] = jnp.broadcast_to(refs.statistics[0, f, 0, 1:2], (LANES, q.tile)).T

        def compute(slot: Array, position: Array, count: int, tested: bool) -> None:
            tokens = steps.kv_vectors(refs, walk, slot, position, count) if tested else Tokens()
            for first, width in tiling.passes(count):
                key = steps.pair.read(refs, False, slot, first, width)
                product = dot(refs.query[...].reshape(rows, -1), key, (1, 1), exact)
                x, slope = rule.logits(product, steps.read_bias(refs, slot, first, width))
                if tested:
                    x, slope = rule.masked(x, slope, steps.attends(refs, ids, tokens, slot, first, width))
                p = rule.exp(x - spread(refs.lse[...], width))
                value = steps.pair.read(refs, True, slot, first, width)
                dp = dot(refs.d_out[...].reshape(rows, -1), value, (1, 1), exact)
                ds = p * (dp - spread(refs.delta[...], width))
                if slope is not None:
                    ds = ds * slope
                acc[...] += dot(ds.astype(key.dtype), key, (1, 0), exact)

        walk.run(tuple(ids), tuple(after), compute)
        refs.dq[...] = (acc[...] * call.scale).astype(refs.dq.dtype).reshape(refs.dq.shape)

    own = lambda *shape: pl.BlockSpec((1, fold, 1, *shape), lambda b, h, i: (b, h, i, *(0,) * len(shape)))  # noqa: E731
    (out,) = launch(
        body,
        name="xsake_dq",
        call=call,
        grid=steps.grid,
        work=steps.work,
        chunks=steps.chunks,
        inputs={
            "query": (q.cut_heads(call.query), own(q.tile, call.head_dim)),
            "d_out": (q.cut_heads(d_out), own(q.tile, call.value_dim)),
            "statistics": (row_statistics(rule, lse, delta), own(2, q.tile)),
            "q_tokens": steps.q_tokens,
        },
        streams=steps.streams,
        outputs={
            "dq": (
                (call.batch, call.q_heads, q.tiles, q.tile, call.head_dim),
                call.query.dtype,
                own(q.tile, call.head_dim),
            )
        },
        scratch={
            "lse": pltpu.VMEM((rows, LANES), jnp.float32),
            "delta": pltpu.VMEM((rows, LANES), jnp.float32),
            "acc": pltpu.VMEM((rows, call.head_dim), jnp.float32),
        },
        flops=2 * listed_elements(call) * (2 * call.head_dim + call.value_dim),
    )
    return q.uncut_heads(out)
