"""The work of a kernel, prepared by XLA from the mask's lists: one record per grid step, and one long list in HBM.

    record = (start in the list, tiles, tiles that need no element test) of this step, and the same of the next step

A grid step owns one row of tiles (or column, for dK/dV) of one head. It knows the record of the next step too, whose
transfers it starts. Records are small and are pipelined through SMEM. Lists stay in HBM, and the part of each step
comes by DMA: the use of SMEM depends on the longest row alone, not on heads, batch or the number of active blocks.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from xsake.kernels_pallas_tpu.tile.tiles import LANES, Axis, round_up

WORDS = 8  # per record, of which six are used
PER_BLOCK = LANES // WORDS


@dataclasses.dataclass(frozen=True)
class Work:
    """A row of 128 words holds 16 records. `window`: rows of `lists` that suffice for the part of any step.

    `lists` has the numbers of blocks and, beside them, those of their bitmaps, where the mask has bitmaps, and their
    homes, where keys lie in pages.
    """

    records: Int[Array, "R 1 128"]
    lists: Int[Array, "L planes 128"]
    window: int


def lists_and_records(
    indices: Int[Array, "b h N"],
    row_ptr: Int[Array, "b h R1"],
    num_full: Int[Array, "b h R"],
    *beside: Int[Array, "b h N"] | None,
    rows: Axis,
    columns: Axis,
    steps: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> Work:
    """`steps`: the mask batch, mask head and tile of rows of every grid step, in the order of the grid. `beside`: more
    numbers per slot of the lists, where they are not None.
    """
    _, h, capacity = indices.shape
    ptr = jnp.minimum(row_ptr, capacity)
    mask_b, mask_h, tile = steps
    row = tile // rows.split
    list_number = mask_b * h + mask_h
    first, last = ptr[mask_b, mask_h, row], ptr[mask_b, mask_h, row + 1]
    count = (last - first) * columns.split
    missing = columns.blocks * columns.split - columns.tiles
    if missing:  # the end of the sequence cuts the last block: a row that ends with it has fewer tiles
        cut = indices[mask_b, mask_h, jnp.maximum(last - 1, 0)] == columns.blocks - 1
        count = jnp.where(cut & (last > first), count - missing, count)
    full = jnp.minimum(num_full[mask_b, mask_h, row], last - first) * columns.split
    record = jnp.stack([list_number * capacity + first, count, full], -1).astype(jnp.int32)
    after = jnp.concatenate([record[1:], jnp.zeros((1, 3), jnp.int32)])
    words = jnp.concatenate([record, after, jnp.zeros((len(tile), WORDS - 6), jnp.int32)], -1)
    words = jnp.pad(words, ((0, -len(tile) % PER_BLOCK), (0, 0))).reshape(-1, 1, LANES)

    window = -(-(columns.blocks + LANES - 1) // LANES)
    # A wrong index would make a DMA leave its array. Clamping is cheap here.
    planes = [jnp.clip(indices, 0, columns.blocks - 1), *(x for x in beside if x is not None)]
    size = round_up(indices.size, LANES) + window * LANES
    flat = [jnp.pad(x.reshape(-1).astype(jnp.int32), (0, size - x.size)).reshape(-1, LANES) for x in planes]
    return Work(words, jnp.stack(flat, 1), window)
