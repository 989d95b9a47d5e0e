"""`mask.compact` as a GPU kernel: each program reads some rows of blocks and writes the columns of active blocks."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Bool, Int

from xsake.hads.mask.lists.triton_call import iota, triton_call, whole

_ENTRIES = 4096  # blocks per program


def compact(
    active: Bool[Array, "b h rows columns"], full: Bool[Array | np.ndarray, "*lead rows columns"], capacity: int
) -> tuple[Int[Array, "b h {capacity}"], Int[Array, "b h rows_and_one"], Int[Array, "b h rows"]]:
    """As `compact.compact`."""
    b, h, rows, columns = active.shape
    per_batch = full.ndim == 4
    num_full = (active & (full if per_batch else full[None, None])).sum(-1, dtype=jnp.int32)
    full = jnp.broadcast_to(full, active.shape) if per_batch else full
    ends = jnp.cumsum(active.sum(-1, dtype=jnp.int32), -1, dtype=jnp.int32)
    row_ptr = jnp.concatenate([jnp.zeros((b, h, 1), jnp.int32), ends], -1)
    width = pl.next_power_of_2(columns)
    tile = max(_ENTRIES // width, 1)

    def kernel(active_ref: Any, full_ref: Any, row_ptr_ref: Any, num_full_ref: Any, out_ref: Any) -> None:
        row = pl.program_id(0) * tile + iota(tile)
        place = jnp.broadcast_to(row[:, None], (tile, width)), jnp.broadcast_to(iota(width)[None, :], (tile, width))
        inside = (place[0] < rows) & (place[1] < columns)
        is_active = plgpu.load(active_ref.at[place], mask=inside, other=0) != 0
        is_full = plgpu.load(full_ref.at[place], mask=inside, other=0) != 0
        start = plgpu.load(row_ptr_ref.at[row], mask=row < rows, other=0)
        middle = start + plgpu.load(num_full_ref.at[row], mask=row < rows, other=0)
        first, second = is_active & is_full, is_active & ~is_full
        slot = jnp.where(is_full, start[:, None] + _before(first), middle[:, None] + _before(second))
        written = is_active & (slot < capacity)
        # Interpretation writes masked elements too, with their old values: the spare slot takes those.
        plgpu.store(out_ref.at[jnp.where(written, slot, capacity)], place[1], mask=written)

    (indices,) = triton_call(
        kernel,
        "hads_compact",
        (-(-rows // tile), h, b),
        [
            (active.astype(jnp.int8), whole(None, None, rows, columns)),
            (jnp.asarray(full, jnp.int8), whole(*(None, None) if per_batch else (), rows, columns)),
            (row_ptr, whole(None, None, rows + 1)),
            (num_full, whole(None, None, rows)),
        ],
        [((b, h, capacity + 1), jnp.int32, whole(None, None, capacity + 1))],
        num_warps=4,
    )
    return indices[..., :capacity], row_ptr, num_full


def _before(chosen: Bool[Array, "tile width"]) -> Int[Array, "tile width"]:
    """For each place, how many places before it in its row are chosen."""
    ones = chosen.astype(jnp.int32)
    return jnp.cumsum(ones, 1) - ones
