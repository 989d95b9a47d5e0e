"""A CTA of the gathered Hopper dK/dV kernel: its warpgroups share operands, shared memory and a column of keys."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from xsake.kernels_pallas_gpu.hopper.gathered.plan import GatheredBarriers, GatheredMemory, GatheredPlan
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS
from xsake.kernels_pallas_gpu.hopper.tile.products import opaque
from xsake.kernels_pallas_gpu.hopper.tile.row_lists import list_coords


class GatheredOperands(NamedTuple):
    """`statistic`: lse as `LogitRule.row_statistic` gives it. `lists`: of columns. `words`: for each slot of the lists
    the queries that chose it, a bit per query. `chosen`: how many queries chose the slots before each slot, a running
    sum.
    """

    q: Any
    k: Any
    v: Any
    d_out: Any
    statistic: Any
    minus_delta: Any
    lists: Any
    words: Any
    chosen: Any


class GatheredResults(NamedTuple):
    """`dk_parts`, `dv_parts`: float32 sums of the parts of early columns."""

    dk: Any
    dv: Any
    dk_parts: Any
    dv_parts: Any


class GatheredColumn(NamedTuple):
    """64 keys of a block. `part`: (pair, rank, part), where the sums of an early column's part go."""

    batch: Any
    head: Any
    coords: tuple[Any, Any]
    block: Any
    kv_start: Any
    is_early: Any
    part: tuple[Any, Any, Any]


class GatheredCta:
    """Multiplies `tiles` tiles of the queries that the column's list names from slot `begin` to slot `end`."""

    def __init__(
        self,
        plan: GatheredPlan,
        given: GatheredOperands,
        results: GatheredResults,
        memory: GatheredMemory,
        barriers: GatheredBarriers,
    ) -> None:
        self.plan, self.given, self.results, self.memory, self.barriers = plan, given, results, memory, barriers
        self.wg = lax.axis_index("wg")
        self.column = column = self.read_column()
        parts, part = plan.columns.parts, column.part[2]
        begin, _, end = given.lists.row(*column.coords, column.block)
        length = end - begin
        self.end = jnp.where(column.is_early, begin + lax.div(length * (part + 1), parts), end)
        self.begin = jnp.where(column.is_early, begin + lax.div(length * part, parts), begin)
        count = given.chosen[(*column.coords, self.end)] - given.chosen[(*column.coords, self.begin)]
        self.tiles = lax.div(count + (plan.pieces - 1), jnp.int32(plan.pieces))
        self.ring = plan.ring(barriers.ready, barriers.free)

    def read_column(self) -> GatheredColumn:
        """Read again where it is needed: values that live through the loops would take registers."""
        plan, lists, per_block = self.plan, self.given.lists, self.plan.columns_per_block
        pair, rank, part = plan.columns.place(opaque(lax.axis_index("cta"), interpret=plan.simulate))
        b, h = lax.div(pair, plan.num_kv_heads), lax.rem(pair, plan.num_kv_heads)
        coords = list_coords(lists, b, h, num_q_heads=plan.num_kv_heads, num_kv_heads=plan.num_kv_heads)
        block = lists.ranked(*coords, lax.div(rank, per_block))
        kv_start = (block * per_block + lax.rem(rank, per_block)) * ROWS
        return GatheredColumn(b, h, coords, block, kv_start, rank < plan.columns.early, (pair, rank, part))
