"""Lists of wide columns: neighbouring short blocks of keys, merged to fill the rows of a matrix product.

A block of queries is in a wide column's list if it lists any run of the column's keys. A bit per run says which:

    keys   0-15   16-31   32-47   48-63       one column of 64 keys
           0 2    0 3     0       0 2         lists of blocks of queries
                                              0 with runs 1111, 2 with runs 1001, 3 with runs 0010
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.mask.lists.rows import by_block, compress, rows_of_slots
from xsake.kernels_pallas_gpu.hopper.tile.row_lists import RowLists


def run_of(block: int, width: int) -> int:
    """Keys per run: a block and a column are whole runs."""
    return math.gcd(block, width)


def wide_columns(mask: BlockMask, width: int) -> tuple[RowLists, Int[Array, "b h slots"]]:
    """The lists of columns of `width` keys, and for every slot its runs: bit r stands for run r of the column.

    An entry is full where all runs are, or lie past the last block.
    """
    run = run_of(mask.block_kv, width)
    slot = jnp.arange(mask.capacity, dtype=jnp.int32)[None, None]
    row = jnp.minimum(rows_of_slots(jnp, mask.q_row_ptr, mask.capacity), mask.num_kv_blocks - 1)
    place = slot - jnp.take_along_axis(mask.q_row_ptr, row, -1)
    is_full = place < jnp.take_along_axis(mask.q_num_full, row, -1)
    kind = jnp.where(is_full, 2, 1).astype(jnp.int8)
    blocks = by_block(jnp, mask.num_q_blocks, 0, mask.q_row_ptr, mask.q_indices, kind)
    runs = jnp.repeat(blocks, mask.block_kv // run, axis=2)
    per_column = width // run
    missing = -runs.shape[2] % per_column

    def of_columns(x: Array, absent: bool) -> Array:
        x = jnp.pad(x, [(0, 0), (0, 0), (0, missing), (0, 0)], constant_values=absent)
        return x.reshape(*x.shape[:2], -1, per_column, x.shape[3])

    bits = (1 << jnp.arange(per_column, dtype=jnp.int32)).reshape(1, 1, 1, -1, 1)
    listed = jnp.where(of_columns(runs > 0, False), bits, 0).sum(3, dtype=jnp.int32)
    full = of_columns(runs == 2, True).all(3)
    capacity = min(mask.capacity * (1 if width % mask.block_kv == 0 else 2), math.prod(listed.shape[2:]))
    lists = RowLists(*compress(jnp, listed > 0, full, capacity))
    b, h = jnp.ogrid[: listed.shape[0], : listed.shape[1]]
    column = jnp.minimum(rows_of_slots(jnp, lists.row_ptr, capacity), listed.shape[2] - 1)
    return lists, listed[b[..., None], h[..., None], column, lists.indices]
