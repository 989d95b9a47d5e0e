"""The memory warpgroup of the gathered Hopper dK/dV kernel: copies queries that chose the block to a ring."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.gathered.cta import GatheredCta
from xsake.kernels_pallas_gpu.hopper.tile.conditions import when


def gather(cta: GatheredCta) -> None:
    plan, ring = cta.plan, cta.ring
    ring.start()
    plgpu.barrier_arrive(cta.barriers.resident)

    def one_entry(slot: Any, carry: Any) -> Any:
        n, last, lowest, first, word = carry
        following = _entry(cta, slot + 1)  # read long before it is needed

        def one_query(carry: Any) -> Any:
            n, _, lowest, word = carry
            query = first + (31 - lax.clz(word & -word))
            return n + 1, query, _copy(cta, n, query, query, lowest), word & (word - 1)

        n, last, lowest, _ = lax.while_loop(lambda c: c[3] != 0, one_query, (n, last, lowest, word))
        return n, last, lowest, *following

    def fill(n: Any, lowest: Any) -> Any:
        return _copy(cta, n, last, jnp.int32(plan.nobody), lowest)

    zero = jnp.int32(0)
    start = zero, zero, zero, *_entry(cta, cta.begin)
    n, last, lowest, *_ = lax.fori_loop(cta.begin, cta.end, one_entry, start)
    lax.fori_loop(n, cta.tiles * plan.pieces, fill, lowest)
    if plan.simulate:
        ring.drain(cta.tiles)


def _entry(cta: GatheredCta, slot: Any) -> tuple[Any, Any]:
    """(first query, bits of the queries) of a slot of the lists."""
    indices = cta.given.lists.indices
    at = (*cta.column.coords, lax.min(slot, jnp.int32(indices.shape[-1] - 1)))
    # `| 0`: a number as it is read has the varying axes of a `jax.shard_map`, a computed one has none.
    return indices[at] * cta.plan.block_q, cta.given.words[at] | 0


def _copy(cta: GatheredCta, n: Any, query: Any, of_statistics: Any, lowest: Any) -> Any:
    """Copy piece n: the heads of `query`, with the statistics of query `of_statistics`: another one, of weight 0, where
    the piece only fills the tile. Returns the lowest query of the tile up to there.
    """
    plan, given, memory, ring, column = cta.plan, cta.given, cta.memory, cta.ring, cta.column
    group, pieces = plan.group, plan.pieces
    tile, piece = lax.div(n, jnp.int32(pieces)), lax.rem(n, jnp.int32(pieces))
    slot = lax.rem(tile, plan.stages)
    lowest = jnp.where(piece == 0, query, lax.min(lowest, query))
    when((piece == 0) & (tile >= plan.stages))(lambda: plgpu.barrier_wait(ring.free.at[slot]))
    ring.tell(memory.numbers, slot, piece, query)
    ring.tell(memory.numbers, slot, pieces, lowest)
    row = piece * group
    for source, tiles in ((given.q, memory.q), (given.d_out, memory.do)):
        ring.copy_heads(source, (column.batch, query, column.head * group), tiles, slot, row, group)
    for source, numbers in ((given.statistic, memory.statistic), (given.minus_delta, memory.delta)):
        ring.copy_numbers(source, (column.batch, column.head, of_statistics * group), numbers, slot, row, group)
    when(piece == pieces - 1)(lambda: ring.complete(slot))
    return lowest
