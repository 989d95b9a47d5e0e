"""The forward kernel: a grid step owns a tile of queries of `fold` heads, and walks its keys with an online softmax."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from xsake.backend.contract import Call
from xsake.kernels_pallas_tpu.config import Tiling, forward_axes
from xsake.kernels_pallas_tpu.launch import Refs, launch, listed_elements
from xsake.kernels_pallas_tpu.query_steps import QuerySteps
from xsake.kernels_pallas_tpu.tile.element import NEG_INF, Rule, Tokens, dot, spread
from xsake.kernels_pallas_tpu.tile.tiles import LANES
from xsake.kernels_pallas_tpu.walk import Walk


def forward(call: Call, tiling: Tiling) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
    q, kv = forward_axes(call, tiling)
    rule, fold, exact = Rule.of(call, q, kv), tiling.fold, call.query.dtype == jnp.float32
    steps = QuerySteps(call, tiling, rule)
    rows, dim = fold * q.tile, call.value_dim
    sinks = None
    if call.sink_lse is not None:
        sinks = jnp.broadcast_to(call.sink_lse.astype(jnp.float32) * rule.unit, (call.batch, call.q_heads))

    def body(refs: Refs, walk: Walk, ids: list[Array], after: list[Array]) -> None:
        peak, total, acc = refs.peak, refs.total, refs.acc
        peak[...] = jnp.full_like(peak, NEG_INF)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

        def compute(slot: Array, position: Array, count: int, tested: bool) -> None:
            tokens = steps.kv_vectors(refs, walk, slot, position, count) if tested else Tokens()
            if tested:
                steps.zero_padding(refs, slot, tokens, count)
            for first, width in tiling.passes(count):
                # QK
                query = refs.query[...].reshape(rows, -1)
                product = dot(query, steps.read(refs, ids, False, slot, first, width), (1, 1), exact)
                x, _ = rule.logits(product, steps.read_bias(refs, slot, first, width))
                if tested:
                    x = jnp.where(steps.attends(refs, ids, tokens, slot, first, width), x, NEG_INF)
                # Softmax
                before = peak[...]
                now = jnp.maximum(before, x.max(1, keepdims=True))
                safe = jnp.where(now == NEG_INF, 0.0, now) if tested or rule.bias else now
                p = rule.exp(x - spread(safe, width))
                decay = rule.exp(before - safe)
                total[...] = total[...] * decay + p.sum(1, keepdims=True)
                peak[...] = now
                # PV
                value = steps.read(refs, ids, True, slot, first, width)
                acc[...] = acc[...] * spread(decay, dim) + dot(p.astype(value.dtype), value, (1, 0), exact)

        walk.run(tuple(ids), tuple(after), compute)

        for f in range(fold):
            part = slice(f * q.tile, (f + 1) * q.tile)
            top, denominator, out = peak[part], total[part], acc[part]
            if sinks is not None:
                sink = refs.sinks[ids[0], ids[1] * fold + f]
                poison = jnp.where(sink != sink, jnp.nan, 0.0)
                sink = jnp.where(sink != sink, 0.0, sink)
                now = jnp.maximum(top, sink)
                safe = jnp.where(now == NEG_INF, 0.0, now)
                decay = rule.exp(top - safe)
                denominator = denominator * decay + rule.exp(sink - safe) + poison
                out, top = out * spread(decay, dim), now
            empty = denominator == 0
            one = jnp.where(empty, 1.0, denominator)
            refs.out[0, f, 0] = (out * spread(1.0 / one, dim)).astype(refs.out.dtype)
            lse = jnp.where(empty, NEG_INF, top * (1 / rule.unit) + jnp.log(one))
            refs.lse[0, f, 0] = _to_lanes(lse)

    own = lambda *shape: pl.BlockSpec((1, fold, 1, *shape), lambda b, h, i: (b, h, i, *(0,) * len(shape)))  # noqa: E731
    out, lse = launch(
        body,
        name="xsake_forward",
        call=call,
        grid=steps.grid,
        work=steps.work,
        chunks=steps.chunks,
        inputs={
            "query": (q.cut_heads(call.query), own(q.tile, call.head_dim)),
            "q_tokens": steps.q_tokens,
            "sinks": None if sinks is None else (sinks, pl.BlockSpec(memory_space=pltpu.SMEM)),
        },
        streams=steps.streams,
        outputs={
            "out": (
                (call.batch, call.q_heads, q.tiles, q.tile, dim),
                call.query.dtype,
                own(q.tile, dim),
            ),
            "lse": ((call.batch, call.q_heads, q.tiles, 1, q.tile), jnp.float32, own(1, q.tile)),
        },
        scratch={
            "peak": pltpu.VMEM((rows, LANES), jnp.float32),
            "total": pltpu.VMEM((rows, LANES), jnp.float32),
            "acc": pltpu.VMEM((rows, dim), jnp.float32),
        },
        flops=2 * listed_elements(call) * (call.head_dim + dim),
    )
    return q.uncut_heads(out), q.uncut(lse[:, :, :, 0], 2)


def _to_lanes(x: Array) -> Array:
    """From [n, 128], whose lanes are all equal, to [1, n]."""
    n = x.shape[0]
    if n % LANES:
        x = jnp.concatenate([x, jnp.zeros((-n % LANES, LANES), x.dtype)])
    return x.T[:1, :n]
