"""The results of few queries from those of their parts (`_few_queries`) in one kernel, where XLA would run six.

Decoding waits for every kernel of every layer, however small. Lowered by Pallas-Triton.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float

from xsake._few_queries import FewQueries
from xsake.hads.mask.triton_call import iota, triton_call

_MOST_NUMBERS = 64 * 128  # of the parts' outputs in a program's registers


def merged(
    few: FewQueries, out: Float[Array, "B R h Dv"], lse: Float[Array, "B h R"]
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
    """`few.results(out, lse)`."""
    b, _, heads, d = out.shape
    cut, t = few.cut, few.given.q_len
    parts, width = pl.next_power_of_2(cut.parts), pl.next_power_of_2(d)
    step = min(width, max(_MOST_NUMBERS // parts, 16))  # columns at a time
    sinks = few.given.sink_lse
    if sinks is None:
        sinks = jnp.full((1, heads * cut.group), -jnp.inf, jnp.float32)
    shared_sinks = sinks.shape[0] == 1

    def kernel(out_ref: Any, lse_ref: Any, sink_ref: Any, merged_ref: Any, total_ref: Any) -> None:
        part = iota(parts)
        exists = part < cut.parts
        own = plgpu.load(lse_ref.at[part], mask=exists, other=-jnp.inf)
        sink = sink_ref[0].astype(jnp.float32)
        peak = jnp.maximum(own.max(), sink)
        safe = jnp.where(peak == -jnp.inf, 0.0, peak)
        weight = jnp.exp(own - safe)
        total = weight.sum() + jnp.exp(sink - safe)
        empty = total == 0
        share = weight / jnp.where(empty, 1.0, total)
        for first in range(0, d, step):
            column = first + iota(step)
            place = jnp.broadcast_to(part[:, None], (parts, step)), jnp.broadcast_to(column[None], (parts, step))
            inside = exists[:, None] & (column < d)[None]
            x = plgpu.load(out_ref.at[place], mask=inside, other=0.0).astype(jnp.float32)
            # A part of no keys has the weight 0, and zeros.
            found = (x * share[:, None]).sum(0).astype(merged_ref.dtype)
            plgpu.store(merged_ref.at[pl.ds(first, step)], found, mask=column < d)
        total_ref[0] = jnp.where(empty, -jnp.inf, safe + jnp.log(jnp.where(empty, 1.0, total)))

    def at(row: Any, head: Any) -> tuple[Any, Any]:
        """(query head, token) of a row."""
        return head * cut.group + row // t, row % t

    found, total = triton_call(
        kernel,
        "xsake_merge",
        (cut.group * t, heads, b),
        [
            (
                out.reshape(b, cut.parts, cut.rows, heads, d),
                pl.BlockSpec((None, cut.parts, None, None, d), lambda r, h, b: (b, 0, r, h, 0)),
            ),
            (
                lse.reshape(b, heads, cut.parts, cut.rows),
                pl.BlockSpec((None, None, cut.parts, None), lambda r, h, b: (b, h, 0, r)),
            ),
            (sinks, pl.BlockSpec((None, 1), lambda r, h, b: (0 if shared_sinks else b, at(r, h)[0]))),
        ],
        [
            (
                (b, t, heads * cut.group, width),
                jnp.float32,
                pl.BlockSpec((None, None, None, width), lambda r, h, b: (b, at(r, h)[1], at(r, h)[0], 0)),
            ),
            (
                (b, heads * cut.group, t, 1),
                jnp.float32,
                pl.BlockSpec((None, None, None, 1), lambda r, h, b: (b, *at(r, h), 0)),
            ),
        ],
        num_warps=4,
    )
    return found[..., :d], total[..., 0]
