"""The memory warpgroup of the Hopper dK/dV kernel: publishes items, loads their keys ahead, and streams Q and dO."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from xsake.kernels_pallas_gpu.hopper.dkv.cta import DkvCta
from xsake.kernels_pallas_gpu.hopper.tile.conditions import as_number, when
from xsake.kernels_pallas_gpu.hopper.work.streaming import Span


def load_item(cta: DkvCta, turn: Any, number: Any, counts: Any) -> Any:
    """`counts`: tiles of every ring's earlier items; returns them with this item's."""
    plan, work = cta.plan, cta.work
    pair, rank, part = work.columns.place(number, cta.given.interleaved)
    piece = jnp.where(rank < work.early, rank * work.parts + part, -1) if work.parts > 1 else jnp.int32(-1)
    (b, kv_head), coords = cta.head(pair), cta.coords(pair)
    places = [work.place(cta.given.lists, coords(0), rank, ring) for ring in range(work.rings)]
    cta.notes.publish(turn, [pair, piece, *(x for place in places for x in place[:2])])
    for reader in range(plan.compute_wgs if plan.ahead else 0):
        row = cta.first_row(places[reader if work.rings > 1 else 0][0], reader)
        cta.load_residents(b, row, kv_head, lax.rem(turn, 2) * plan.compute_wgs + reader)

    def load_head(g: Any, counts: Any) -> Any:
        head = kv_head * plan.group + g
        spans = [cta.streamed.span(coords(g), column, exists) for _, column, exists in places]

        def fetch(t: Any, counts: Any) -> Any:
            for ring, (n, span) in enumerate(zip(counts, spans, strict=True)):

                @when(t < span.num_tiles)
                def _(ring: int = ring, n: Any = n, span: Span = span) -> None:
                    cta.load_tile(n, ring, b, head, coords(g), span, t)

            return tuple(n + as_number(t < span.num_tiles) for n, span in zip(counts, spans, strict=True))

        return lax.fori_loop(0, functools.reduce(jnp.maximum, [span.num_tiles for span in spans]), fetch, counts)

    return lax.fori_loop(*cta.heads(piece), load_head, counts)
