"""Merges partial attention outputs by their logsumexp: the parts of few queries' keys, and the parts of long rows.

Decoding waits for every kernel of every layer, however small: Pallas-Triton lowers each merge to one kernel, where XLA
would run six. `xsake._rewrites.few_queries` cuts the keys of few queries, `lists.work_order` cuts long rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float

from xsake._rewrites.few_queries import FewQueries
from xsake.hads.mask.lists.triton_call import iota, triton_call, whole
from xsake.kernels_pallas_gpu.lists.work_order import MOST_PARTS, WorkOrder

_MOST_NUMBERS = 64 * 128  # numbers of the parts' outputs in a program's registers


class MergedQueries(FewQueries):
    """`FewQueries` whose parts are merged by the kernel."""

    def results(
        self, out: Float[Array, "B R h Dv"], lse: Float[Array, "B h R"]
    ) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
        return merged(self, out, lse)


def merged(
    few: FewQueries, out: Float[Array, "B R h Dv"], lse: Float[Array, "B h R"]
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
    """What `FewQueries.results` computes."""
    b, _, heads, d = out.shape
    cut, t = few.parts, few.given.q_len
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
            # A part without keys has weight 0 and an output of zeros.
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


def merged_rows(
    order: WorkOrder,
    out: Float[Array, "B T H Dv"],
    lse: Float[Array, "B H N"],
    parts: Float[Array, "P block Dv"],
    parts_lse: Float[Array, "P block"],
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H N"]]:
    """`out` and `lse` with the rows that a `WorkOrder` cut, each merged from its parts.

    The parts are rounded already, so these rows are rounded once more than others.
    """
    (_, length, heads, dim), (_, _, padded), block = out.shape, lse.shape, parts.shape[1]
    n, width = padded // block, min(dim & -dim, 64)  # columns at a time

    def kernel(
        of_row: Any, parts_ref: Any, parts_lse_ref: Any, _out: Any, _lse: Any, out_ref: Any, lse_ref: Any
    ) -> None:
        number = pl.program_id(0)
        first, last = (f(of_row[0, number], jnp.int32(MOST_PARTS)) for f in (lax.div, lax.rem))

        @pl.when(last > 0)
        def _merge() -> None:
            head, row = lax.div(number, jnp.int32(n)), lax.rem(number, jnp.int32(n))
            batch, head = lax.div(head, jnp.int32(heads)), lax.rem(head, jnp.int32(heads))
            rows = pl.ds(row * block, block)

            def lse_of(part: int) -> Array:
                there = jnp.broadcast_to(part <= last, (block,))
                return plgpu.load(parts_lse_ref.at[first + part, pl.ds(0, block)], mask=there, other=-jnp.inf)

            own = [lse_of(part) for part in range(MOST_PARTS)]
            peak = functools.reduce(jnp.maximum, own)
            safe = jnp.where(peak == -jnp.inf, 0.0, peak)
            weights = [jnp.exp(x - safe) for x in own]
            total = functools.reduce(jnp.add, weights)
            inverse = jnp.where(total == 0.0, 0.0, 1.0 / total)
            exists = jnp.broadcast_to((row * block + iota(block) < length)[:, None], (block, width))
            for begin in range(0, dim, width):
                columns, found = pl.ds(begin, width), jnp.zeros((block, width), jnp.float32)
                for part, weight in enumerate(weights):
                    there = jnp.broadcast_to(part <= last, (block, width))
                    x = plgpu.load(parts_ref.at[first + part, pl.ds(0, block), columns], mask=there, other=0.0)
                    found += x.astype(jnp.float32) * (weight * inverse)[:, None]
                plgpu.store(out_ref.at[batch, rows, head, columns], found.astype(out_ref.dtype), mask=exists)
            lse_ref[batch, head, rows] = jnp.where(total == 0.0, -jnp.inf, safe + jnp.log(total))

    arrays = (order.parts_of, parts, parts_lse, out, lse)
    found, found_lse = triton_call(
        kernel,
        "xsake_merge_rows",
        (order.parts_of.shape[1] - 1,),
        [(x, whole(*x.shape)) for x in arrays],
        [(x.shape, x.dtype, whole(*x.shape)) for x in (out, lse)],
        num_warps=4,
        aliases={3: 0, 4: 1},
    )
    return found, found_lse
