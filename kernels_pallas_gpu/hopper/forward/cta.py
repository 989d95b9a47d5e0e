"""A CTA of the Hopper forward: its warpgroups share operands and shared memory, and have the number of their worker."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from xsake.kernels_pallas_gpu.hopper.forward.config import Pairing
from xsake.kernels_pallas_gpu.hopper.forward.plan import PUBLISHED, ForwardBarriers, ForwardMemory, ForwardPlan
from xsake.kernels_pallas_gpu.hopper.tile.products import release
from xsake.kernels_pallas_gpu.hopper.tile.row_lists import ListRefs
from xsake.kernels_pallas_gpu.hopper.work.items import ItemNotes, ItemRefs


class ForwardCta:
    """`refs`: query, key, value; `num_lists` block lists (3, or 4 with their order); the operands named in `options`;
    the counter of items, if the schedule is dynamic; out and lse, and out and lse of parts, if rows are cut.
    """

    def __init__(
        self,
        plan: ForwardPlan,
        refs: Sequence[Any],
        num_lists: int,
        options: Sequence[str],
        memory: ForwardMemory,
        barriers: ForwardBarriers,
    ) -> None:
        self.plan, self.memory, self.barriers = plan, memory, barriers
        self.q, self.k, self.v = refs[:3]
        indices, row_ptr, num_full, *order = refs[3 : 3 + num_lists]
        self.lists = ListRefs(indices, row_ptr, num_full, order[0] if order else None)
        rest = refs[3 + num_lists :]
        self.options = dict(zip(options, rest, strict=False))
        rest = rest[len(options) :]
        self.counter = rest[: plan.dynamic]
        self.out, self.lse, *self.parts = rest[plan.dynamic :]
        self.wg = lax.axis_index("wg")
        self.ring = lax.rem(self.wg, 2)
        self.worker = lax.axis_index("cta") * plan.workers_per_cta + (self.ring if self._apart else 0)
        refs = ItemRefs(memory.notes, barriers.item_ready, barriers.item_free, barriers.ticket_ready)
        own = (self.ring,) if self._apart else ()
        self.items = ItemNotes(refs=refs, fields=PUBLISHED, tickets=self._end_of_runs, worker=own)

    @property
    def _apart(self) -> bool:
        return self.plan.pairing is Pairing.APART

    def stage(self, ref: Any, slot: Any) -> Any:
        """A slot of this worker's ring of buffers or barriers."""
        return ref.at[self.ring, slot] if self._apart else ref.at[slot]

    def query_slot(self, turn: Any, consumer: Any) -> Any:
        return slot_of(turn, self.plan.q_stages) * self.plan.compute_wgs + consumer

    # -- where things stand in the notes: two items, the runs of every slot, two tickets, the bitmaps of every slot ----

    def run_field(self, slot: Any, part: int, reader: Any = None) -> tuple[Any, ...]:
        """`reader`: the compute warpgroup for which the run is noted, by default this one; mostly they share notes."""
        run = slot * self.plan.parts + part
        if self.plan.readers > 1:
            run += (self.wg if reader is None else reader) * (self.plan.stages * self.plan.parts)
        return self._at_ring(2 * PUBLISHED + run)

    def bitmap_field(self, slot: Any, part: int) -> tuple[Any, ...]:
        return self._at_ring(self._end_of_runs + 2 + slot * self.plan.parts + part)

    @property
    def _end_of_runs(self) -> int:
        return 2 * PUBLISHED + self.plan.readers * self.plan.stages * self.plan.parts

    def _at_ring(self, index: Any) -> tuple[Any, ...]:
        return (self.ring, index) if self._apart else (index,)

    def release(self, barrier: Any) -> None:
        release(barrier, interpret=bool(self.plan.interpret))


def slot_of(count: Any, depth: int) -> Any:
    return count % depth if isinstance(count, int) else lax.rem(count, jnp.int32(depth))
