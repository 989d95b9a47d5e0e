"""The memory warpgroup of the Hopper dQ kernel: publishes items, loads their queries ahead, and streams K and V."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.dq.cta import DqCta
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS
from xsake.kernels_pallas_gpu.hopper.tile.conditions import when
from xsake.kernels_pallas_gpu.hopper.work.streaming import Span


def load_item(cta: DqCta, turn: Any, number: Any, counts: Any) -> Any:
    """`counts`: tiles of every ring's earlier items; returns them with this item's."""
    plan, work, streamed = cta.plan, cta.work, cta.streamed
    pair, rank, _ = work.columns.place(number)
    b, h = cta.head(pair)
    kv_head, coords = lax.div(h, plan.group), cta.coords(pair)
    places = []  # (first row, its list) of every ring
    for ring in range(work.rings):
        start, block, exists = work.place(cta.given.lists, coords, rank, ring)
        places.append((start, streamed.span(coords, block, exists)))
    cta.notes.publish(turn, [pair, *(x for start, span in places for x in (start, *span[:3]))])
    for reader in range(plan.compute_wgs):
        row = cta.first_row(places[reader if work.rings > 1 else 0][0], reader)
        if plan.ahead:
            cta.load_residents(b, row, h, lax.rem(turn, 2) * plan.compute_wgs + reader)
        if plan.sums_delta and not plan.simulate:
            plgpu.async_prefetch(cta.given.minus_delta.out.at[b, pl.ds(row, ROWS), h])

    @pl.loop(0, functools.reduce(jnp.maximum, [span.num_tiles for _, span in places]))
    def _fetch(t: Any) -> None:
        for ring, (before, (_, span)) in enumerate(zip(counts, places, strict=True)):

            @when(t < span.num_tiles)
            def _(ring: int = ring, span: Span = span, n: Any = before + t) -> None:
                cta.load_tile(n, ring, b, kv_head, coords, span, t)

    return tuple(before + span.num_tiles for before, (_, span) in zip(counts, places, strict=True))
