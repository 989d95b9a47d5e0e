"""CTAs that stay and take one item of work after another.

A CTA of a Hopper backward takes most of an SM's shared memory. If every item were a CTA of its own, the next could only
start when the last has ended: reading its lists and filling its rings took as long as several tiles. Here the memory
warpgroup reads the next item's lists and loads its first tiles while the compute warpgroups finish the last item.

The memory warpgroup publishes what the others need to know of an item in `notes`, which has two places for items and
two for the numbers that it draws. When it has loaded all of an item, it draws the number of the next from a counter in
global memory: CTAs with short items take more of them, and at the end none has drawn an item that it cannot begin.
Interpreted kernels have no such counter: there items are dealt out, backwards in odd turns, because they are sorted by
length.

Where shared memory has room for the resident rows of two items, the memory warpgroup also loads those of the next one
ahead. A compute warpgroup then begins the next item while the copy engine still reads the results of the last.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.limits import hopper_sms
from xsake.kernels_pallas_gpu.hopper.tile.common import take_ticket, tell_ticket
from xsake.kernels_pallas_gpu.hopper.tile.conditions import when

NO_ITEM = -1  # the first field when there is nothing left to do
INTERPRETED_CTAS = 2


class Scratch(NamedTuple):
    notes: Any
    ready: Any
    free: Any
    ticket: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
    """`fields`: numbers that are published of an item; the first is not negative. `ahead`: whether the memory warpgroup
    loads resident rows.
    """

    items: int
    fields: int
    ahead: bool
    compute_wgs: int
    interpret: bool

    @property
    def ctas(self) -> int:
        return min(self.items, INTERPRETED_CTAS if self.interpret else hopper_sms())

    def counter(self) -> Any:
        return None if self.interpret else jax.new_ref(jnp.zeros((1,), jnp.int32))

    def scratch(self) -> Scratch:
        return Scratch(
            notes=plgpu.SMEM((2 * self.fields + 2,), jnp.int32),
            ready=plgpu.Barrier(num_barriers=2),
            free=plgpu.Barrier(num_arrivals=self.compute_wgs, num_barriers=2),
            ticket=None if self.interpret else plgpu.Barrier(),
        )

    def field(self, turn: Any, which: int) -> Any:
        return lax.rem(turn, 2) * self.fields + which

    # -- the memory warpgroup ------------------------------------------------------------------------------------------

    def deal(self, refs: Scratch, counter: Any, load: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """`carry = load(turn, number, carry)` for the items of this CTA; `load` publishes the item first."""

        def one_turn(state: Any) -> Any:
            turn, number, carry = state
            carry = load(turn, number, carry)
            return turn + 1, self._next(refs, counter, turn), carry

        start = jnp.int32(0), lax.axis_index("cta"), carry
        turns, _, carry = lax.while_loop(lambda state: state[1] < self.items, one_turn, start)
        self.publish(refs, turns, [jnp.int32(NO_ITEM)])
        if self.interpret:  # which requires that every completed barrier was waited for
            for last in (turns, turns - 1):
                when(last >= 0)(lambda last=last: plgpu.barrier_wait(refs.free.at[lax.rem(last, 2)]))
        return carry

    def publish(self, refs: Scratch, turn: Any, values: list[Any]) -> None:
        slot = lax.rem(turn, 2)
        when(turn >= 2)(lambda: plgpu.barrier_wait(refs.free.at[slot]))
        for which, value in enumerate(values):
            refs.notes[self.field(turn, which)] = value
        plgpu.barrier_arrive(refs.ready.at[slot])

    def _next(self, refs: Scratch, counter: Any, turn: Any) -> Any:
        if self.interpret:
            cta, following = lax.axis_index("cta"), turn + 1
            return following * self.ctas + jnp.where(lax.rem(following, 2) == 0, cta, self.ctas - 1 - cta)
        place = 2 * self.fields + lax.rem(turn, 2)
        tell_ticket(take_ticket(counter), refs.notes.at[pl.ds(place, 1)])
        plgpu.barrier_arrive(refs.ticket)
        plgpu.barrier_wait(refs.ticket)
        return refs.notes[place] + self.ctas

    # -- a compute warpgroup -------------------------------------------------------------------------------------------

    def take(self, refs: Scratch, work: Callable[["Item", Any], Any], carry: Any) -> None:
        """`carry = work(item, carry)` for the items of this CTA. With `ahead`, it calls `item.leave_the_last` once."""

        def first_field(turn: Any) -> Any:
            plgpu.barrier_wait(refs.ready.at[lax.rem(turn, 2)])
            return refs.notes[self.field(turn, 0)]

        def one_turn(state: Any) -> Any:
            turn, _, carry = state
            carry = work(Item(self, refs, turn), carry)
            if not self.ahead:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(refs.free.at[lax.rem(turn, 2)])
            return turn + 1, first_field(turn + 1), carry

        start = jnp.int32(0), first_field(jnp.int32(0)), carry
        turn, _, _ = lax.while_loop(lambda state: state[1] != NO_ITEM, one_turn, start)
        if self.ahead:
            Item(self, refs, turn).leave_the_last()
        plgpu.barrier_arrive(refs.free.at[lax.rem(turn, 2)])


@dataclasses.dataclass(frozen=True)
class Item:
    """What a compute warpgroup works on in a turn."""

    turns: Turns
    refs: Scratch
    turn: Any

    def __call__(self, which: int) -> Any:
        """A field. It is read again at every use: values that live through the loops would take registers."""
        return self.refs.notes[self.turns.field(self.turn, which)]

    @property
    def place(self) -> Any:
        """Where its resident rows are."""
        return lax.rem(self.turn, 2) if self.turns.ahead else 0

    def leave_the_last(self) -> None:
        """Waits until the results of the item before have been read from shared memory, and gives its place back."""

        @when(self.turn > 0)
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.refs.free.at[lax.rem(self.turn - 1, 2)])
