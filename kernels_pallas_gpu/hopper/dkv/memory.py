"""The memory warpgroup of the Hopper dK/dV kernel: publishes items, loads their keys ahead, and streams Q and dO."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.dkv.cta import Cta
from xsake.kernels_pallas_gpu.hopper.tile.backward import ROWS, drain
from xsake.kernels_pallas_gpu.hopper.tile.conditions import as_number, when


def load(cta: Cta) -> None:
    plan, work, barriers = cta.plan, cta.work, cta.barriers
    start = (jnp.int32(0),) * work.rings
    counts = cta.turns.deal(cta.turn, cta.given.counter, functools.partial(_load_item, cta), start)
    for ring, count in enumerate(counts if plan.simulate else []):
        drain(barriers.q_free, plan.config.stages, count, (ring,))
        drain(barriers.do_free, plan.config.inner_stages, count, (ring,))


def _load_item(cta: Cta, turn: Any, number: Any, counts: Any) -> Any:
    """`counts`: tiles of every ring's earlier items; returns them with this item's."""
    plan, work = cta.plan, cta.work
    pair, rank, part = work.columns.place(number, cta.given.interleaved)
    piece = jnp.where(rank < work.early, rank * work.parts + part, -1) if work.parts > 1 else jnp.int32(-1)
    b, kv_head, coords = lax.div(pair, plan.num_kv_heads), lax.rem(pair, plan.num_kv_heads), cta.coords(pair)
    places = [work.place(cta.given.lists, coords(0), rank, ring) for ring in range(work.rings)]
    cta.turns.publish(cta.turn, turn, [pair, piece, *(x for place in places for x in place[:2])])
    for reader in range(plan.compute_wgs if plan.ahead else 0):
        first, _, _ = places[reader if work.rings > 1 else 0]
        start = pl.multiple_of(jnp.maximum(first, 0), ROWS) + (reader * ROWS if work.rings == 1 else 0)
        cta.load_keys(b, start, kv_head, lax.rem(turn, 2) * plan.compute_wgs + reader)

    def load_head(g: Any, counts: Any) -> Any:
        head = kv_head * plan.group + g
        spans = [cta.streamed.span(coords(g), column, exists) for _, column, exists in places]

        def fetch(t: Any, counts: Any) -> Any:
            for ring, (n, (begin, _, tiles)) in enumerate(zip(counts, spans, strict=True)):

                @when(t < tiles)
                def _(ring: int = ring, n: Any = n, begin: Any = begin) -> None:
                    slots = cta.slots(n)
                    _load_tile(cta, n, b, head, cta.streamed.start(coords(g), begin, t), ring, *slots)

            return tuple(n + as_number(t < tiles) for n, (_, _, tiles) in zip(counts, spans, strict=True))

        return lax.fori_loop(0, functools.reduce(jnp.maximum, [tiles for _, _, tiles in spans]), fetch, counts)

    return lax.fori_loop(*cta.heads(piece), load_head, counts)


def _load_tile(cta: Cta, n: Any, b: Any, head: Any, start: Any, ring: int, slot: Any, inner: Any) -> None:
    plan, given, scratch, barriers = cta.plan, cta.given, cta.scratch, cta.barriers
    queries = pl.ds(start, plan.tile)
    ready, inner_ready = barriers.q_ready.at[ring, slot], barriers.do_ready.at[ring, inner]

    when(n >= plan.config.stages)(lambda: plgpu.barrier_wait(barriers.q_free.at[ring, slot]))
    plan.packing.load(given.q, b, start, head, scratch.q.at[ring, slot], ready)
    plgpu.copy_gmem_to_smem(given.statistic.at[b, head, queries], scratch.statistic.at[ring, slot], ready)
    for name, x in given.q_vectors.items():
        per_token = x.at[0 if x.shape[0] == 1 else b, queries]
        plgpu.copy_gmem_to_smem(per_token, cta.q_vectors[name].at[ring, slot], ready)

    when(n >= plan.config.inner_stages)(lambda: plgpu.barrier_wait(barriers.do_free.at[ring, inner]))
    plan.packing.load(given.d_out, b, start, head, scratch.do.at[ring, inner], inner_ready)
    plgpu.copy_gmem_to_smem(given.minus_delta.at[b, head, queries], scratch.delta.at[ring, inner], inner_ready)
