"""CTAs that stay and take one item of work after another.

A CTA of a Hopper backward takes most of an SM's shared memory. If every item were a CTA of its own, the next could only
start when the last has ended: reading its lists and filling its rings took as long as several tiles. Here the memory
warpgroup reads the next item's lists and loads its first tiles while the compute warpgroups finish the last item.

When the memory warpgroup has loaded all of an item, it draws the number of the next (`work.items`). Interpreted kernels
have no counter to draw from: there items are dealt out.

Where shared memory has room for the resident rows of two items, the memory warpgroup also loads those of the next one
ahead. A compute warpgroup then begins the next item while the copy engine still reads the results of the last.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.tile.conditions import when
from xsake.kernels_pallas_gpu.hopper.work.items import ItemNotes, ItemRefs, dealt
from xsake.kernels_pallas_gpu.hopper.work.tickets import take_ticket
from xsake.kernels_pallas_gpu.limits import hopper_sms

NO_ITEM = -1  # the first field when there is nothing left to do
INTERPRETED_CTAS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
    """`fields`: how many numbers are published per item; the first is never negative, so that NO_ITEM marks the end.
    `ahead`: whether the memory warpgroup loads resident rows.
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

    def memory(self) -> ItemRefs:
        return ItemRefs(
            notes=plgpu.SMEM((2 * self.fields + 2,), jnp.int32),
            ready=plgpu.Barrier(num_barriers=2),
            free=plgpu.Barrier(num_arrivals=self.compute_wgs, num_barriers=2),
            ticket=None if self.interpret else plgpu.Barrier(num_barriers=(1,)),
        )

    def notes(self, refs: ItemRefs) -> ItemNotes:
        return ItemNotes(refs=refs, fields=self.fields, tickets=2 * self.fields)

    # -- the memory warpgroup ------------------------------------------------------------------------------------------

    def deal(self, notes: ItemNotes, counter: Any, load: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """`carry = load(turn, number, carry)` for the items of this CTA; `load` publishes the item first."""

        def one_turn(state: Any) -> Any:
            turn, number, carry = state
            carry = load(turn, number, carry)
            return turn + 1, self._next(notes, counter, turn), carry

        start = jnp.int32(0), lax.axis_index("cta"), carry
        turns, _, carry = lax.while_loop(lambda state: state[1] < self.items, one_turn, start)
        notes.publish(turns, [jnp.int32(NO_ITEM)])
        if self.interpret:  # which requires that every completed barrier was waited for
            for last in (turns, turns - 1):
                when(last >= 0)(lambda last=last: notes.wait_until_left(last))
        return carry

    def _next(self, notes: ItemNotes, counter: Any, turn: Any) -> Any:
        if self.interpret:
            return dealt(turn + 1, lax.axis_index("cta"), self.ctas)
        return notes.ticket(turn, lambda: take_ticket(counter)) + self.ctas

    # -- a compute warpgroup -------------------------------------------------------------------------------------------

    def take(self, notes: ItemNotes, work: Callable[["Item", Any], Any], carry: Any) -> None:
        """`carry = work(item, carry)` for the items of this CTA. With `ahead`, it calls `item.leave_the_last` once."""

        def first_field(turn: Any) -> Any:
            notes.wait(turn)
            return notes(turn, 0)

        def one_turn(state: Any) -> Any:
            turn, _, carry = state
            carry = work(Item(notes, turn, self.ahead), carry)
            if not self.ahead:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                notes.leave(turn)
            return turn + 1, first_field(turn + 1), carry

        start = jnp.int32(0), first_field(jnp.int32(0)), carry
        turn, _, _ = lax.while_loop(lambda state: state[1] != NO_ITEM, one_turn, start)
        if self.ahead:
            Item(notes, turn, self.ahead).leave_the_last()
        notes.leave(turn)


@dataclasses.dataclass(frozen=True)
class Item:
    """The item of a compute warpgroup in a turn."""

    notes: ItemNotes
    turn: Any
    ahead: bool

    def __call__(self, which: int) -> Any:
        """A field."""
        return self.notes(self.turn, which)

    @property
    def place(self) -> Any:
        """Where its resident rows are."""
        return lax.rem(self.turn, 2) if self.ahead else 0

    def leave_the_last(self) -> None:
        """Waits until the results of the item before have been read from shared memory, and gives its place back."""

        @when(self.turn > 0)
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.notes.leave(self.turn - 1)
