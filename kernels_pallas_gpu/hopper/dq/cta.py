"""A CTA of the Hopper dQ kernel: its warpgroups share operands, shared memory and tiles of queries."""

from typing import Any, NamedTuple

from xsake.kernels_pallas_gpu.hopper.dq.plan import DqMemory, DqPlan
from xsake.kernels_pallas_gpu.hopper.tile.row_lists import list_coords
from xsake.kernels_pallas_gpu.hopper.work.items import ItemRefs
from xsake.kernels_pallas_gpu.hopper.work.plan import StreamBarriers
from xsake.kernels_pallas_gpu.hopper.work.streaming import PLAIN, StreamingCta


class DqOperands(NamedTuple):
    """`statistic`: lse as `LogitRule.row_statistic` gives it. `minus_delta`: -delta, or the `DeltaParts` from
    which the kernel sums it. `lists`: the mask's rows. `counter`: the number of the next item.
    """

    q: Any
    k: Any
    v: Any
    d_out: Any
    statistic: Any
    minus_delta: Any
    q_vectors: dict[str, Any]
    kv_vectors: dict[str, Any]
    lists: Any
    bias: Any
    bits: Any
    counter: Any


class DqResults(NamedTuple):
    """`minus_delta`: if the kernel sums it, otherwise None."""

    dq: Any
    minus_delta: Any


class DqCta(StreamingCta[DqPlan]):
    """Takes one item of work after another: the queries of a tile, or of a tile per ring."""

    def __init__(
        self,
        plan: DqPlan,
        given: DqOperands,
        results: DqResults,
        memory: DqMemory,
        barriers: StreamBarriers,
        items: ItemRefs,
    ) -> None:
        super().__init__(plan, given, results, memory, barriers, items)
        self.kv_vectors = {name: memory.kv_vectors.at[i] for i, name in enumerate(plan.kv_vectors)}
        self.residents, self.resident_packing = ((given.q, memory.q), (given.d_out, memory.do)), plan.packing
        numbers = [(x, self.kv_vectors[name]) for name, x in given.kv_vectors.items()]
        self.stream(
            plan.block_kv,
            outer=dict(source=given.k, tiles=memory.k, numbers=numbers, packing=PLAIN, starts=memory.starts),
            inner=dict(source=given.v, tiles=memory.v, numbers=[], packing=PLAIN),
        )

    def coords(self, pair: Any) -> tuple[Any, Any]:
        plan = self.plan
        return list_coords(
            self.given.lists, *self.head(pair), num_q_heads=plan.num_q_heads, num_kv_heads=plan.num_kv_heads
        )
