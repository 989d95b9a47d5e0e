"""Items of work: what a memory warpgroup tells the compute warpgroups of an item, and how it gets the item's number.

A worker, a CTA or half of one, takes one item after another, each in a turn. Its memory warpgroup publishes an item in
`notes`, which has places for the items of two turns, and two for the numbers that it draws from a counter in global
memory. A worker draws one more number with each item that it loads: workers with short items take more of them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.tile.conditions import when
from xsake.kernels_pallas_gpu.hopper.work.tickets import tell_ticket


class ItemRefs(NamedTuple):
    """`notes`: int32. Barriers: `ready` and `free` of two places; `ticket` of one, for the memory warpgroup alone."""

    notes: Any
    ready: Any
    free: Any
    ticket: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ItemNotes:
    """Field f of the item in turn t is `notes[*worker, t % 2 * fields + f]`; its ticket is at `tickets + t % 2`.

    `worker`: the index, as a tuple, of this worker's own notes and barriers; () where the CTA has one worker.
    """

    refs: ItemRefs
    fields: int
    tickets: int
    worker: tuple[Any, ...] = ()

    def __call__(self, turn: Any, field: int) -> Any:
        """A field. It is read again at every use: values that live through the loops would take registers."""
        return self.refs.notes[self._field(turn, field)]

    def _field(self, turn: Any, field: int) -> tuple[Any, ...]:
        return *self.worker, lax.rem(turn, 2) * self.fields + field

    def _place(self, turn: Any) -> tuple[Any, ...]:
        return *self.worker, lax.rem(turn, 2)

    # -- a compute warpgroup -------------------------------------------------------------------------------------------

    def wait(self, turn: Any) -> None:
        plgpu.barrier_wait(self.refs.ready.at[self._place(turn)])

    def leave(self, turn: Any) -> None:
        """Gives the item's place back."""
        plgpu.barrier_arrive(self.refs.free.at[self._place(turn)])

    # -- the memory warpgroup ------------------------------------------------------------------------------------------

    def publish(self, turn: Any, values: Sequence[Any]) -> None:
        place = self._place(turn)
        when(turn >= 2)(lambda: plgpu.barrier_wait(self.refs.free.at[place]))
        for field, value in enumerate(values):
            self.refs.notes[self._field(turn, field)] = value
        plgpu.barrier_arrive(self.refs.ready.at[place])

    def wait_until_left(self, turn: Any) -> None:
        plgpu.barrier_wait(self.refs.free.at[self._place(turn)])

    def ticket(self, turn: Any, take: Callable[[], jax.Array]) -> Any:
        """The number that `take` took from the counter, as `take_ticket` does, in all threads."""
        place = self.tickets + lax.rem(turn, 2)
        tell_ticket(take(), self.refs.notes.at[(*self.worker, pl.ds(place, 1))])
        barrier = self.refs.ticket.at[(*self.worker, 0)]
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return self.refs.notes[(*self.worker, place)]


def dealt(turn: Any, worker: Any, num_workers: int) -> Any:
    """The number of a worker's item in a turn, where items are dealt out and not drawn.

    Odd turns go through the workers backwards: items are sorted by length, and so the workers get equal shares.
    """
    return turn * num_workers + jnp.where(lax.rem(turn, 2) == 0, worker, num_workers - 1 - worker)
