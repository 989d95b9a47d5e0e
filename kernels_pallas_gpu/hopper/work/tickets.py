"""Tickets: numbers that CTAs draw from a counter in global memory, each number once."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir


def take_ticket(counter: Any) -> jax.Array:
    """Adds one to a counter in global memory, and returns the old value in one thread of the warpgroup only.

    `tell_ticket` writes it for the other threads. No thread waits for the value before it uses it.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    )
    def fetch_and_add(_: Any, counter: Any) -> Any:
        ticket = mgpu_utils.inline_ptx(
            "{.reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0; mov.b32 $0, 0; "
            "@p atom.relaxed.gpu.global.add.u32 $0, [$1], 1;}",
            mgpu_utils.memref_ptr(counter),
            result_types=ir.IntegerType.get_signless(32),
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(ticket, (), is_signed=True)

    return fetch_and_add(counter)


def tell_ticket(ticket: jax.Array, slot: Any) -> None:
    """Writes the ticket to shared memory, where other threads may read it after a barrier."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, plgpu.RefType()))
    def store(_: Any, ticket: Any, slot: Any) -> None:
        mgpu_utils.inline_ptx(
            "{.reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0; "
            "@p st.shared.u32 [$0], $1;}",
            mgpu_utils.memref_ptr(slot),
            ticket.registers.item(),
        )

    store(ticket, slot)
