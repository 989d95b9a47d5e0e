"""The masks of one shard's rows, inside `jax.shard_map`: against all keys, the keys of each hop, or chosen blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.mask.lists.compact import compact
from xsake.hads.mask.lists.mask_lists import MaskLists
from xsake.hads.mask.lists.with_bitmaps import with_bitmaps
from xsake.hads.mask.row_shards import RowShards


def mask_of_all_keys(rows: RowShards, shard: Any, *, transpose: bool) -> BlockMask:
    """The mask of shard `shard`'s rows and of all keys, as they lie on the shards."""
    blocks = rows.to_blocks()
    return mask_of_columns(rows, blocks, shard, np.arange(blocks.shape[3], dtype=np.int32), transpose=transpose)


def masks_of_hops(
    rows: RowShards, shard: Any, *, transpose: bool, first: int | None = None
) -> list[tuple[Any, BlockMask]]:
    """For each hop of a ring, the shard whose keys arrive, the own first, and the mask of the own rows and these.

    `first`: of so many hops only. Without bitmaps all lists are made at once: one by one they take as long as the
    attention of a short hop.
    """
    n, shards, width = first or rows.order.shards, rows.order.shards, rows.columns
    holders = [(shard - hop) % shards for hop in range(n)]
    columns = jnp.stack(holders).astype(np.int32)[:, None] * width + np.arange(width, dtype=np.int32)[None]
    blocks = rows.to_blocks().reshape(rows.batch, rows.heads, rows.rows, shards, width)
    active = jnp.moveaxis(jnp.take(blocks, jnp.stack(holders), axis=3), 3, 0)
    if rows.bitmaps is not None:
        masks = [mask_of_columns(rows, active[i], shard, columns[i], transpose=transpose) for i in range(n)]
        return list(zip(holders, masks, strict=True))
    together = active.reshape(n * rows.batch, *active.shape[2:])
    every = mask_of_columns(rows, together, shard, columns, transpose=transpose)
    by_hop = [jax.tree.map(lambda x, i=i: x[i * rows.batch : (i + 1) * rows.batch], every) for i in range(n)]
    return list(zip(holders, by_hop, strict=True))


def mask_of_columns(rows: RowShards, active: Any, shard: Any, columns: Any, *, transpose: bool) -> BlockMask:
    """The mask of shard `shard`'s rows and of key blocks that lie at `columns`, some of them `active`.

    `columns` is [columns], or [n, columns] where the first b of n * b batches have the first row of it, and so on.
    It has no index rule: the caller tests positions inside blocks that are not full. Which are full follows from
    where rows and columns stand in the sequence.
    """
    row = rows.order.number(shard, rows.rows, np.arange(rows.rows, dtype=np.int32))
    column = rows.order.number(columns // rows.columns, rows.columns, columns % rows.columns)
    numbers = None
    if column.ndim == 2:
        full = rows.grid.is_full(row[None, :, None], column[:, None, :])
        full = jnp.repeat(full, rows.batch, axis=0)[:, None]
    else:
        full = rows.grid.is_full(row[:, None], column[None, :])
    if rows.bitmaps is not None:
        numbers = jnp.take(rows.bitmap_numbers(), columns, axis=3)
        whole = (jnp.asarray(rows.bitmaps) == jnp.uint32(2**32 - 1)).all((-2, -1))  # full blocks have all bits
        b, h = (x[..., None, None] for x in np.ogrid[: rows.batch, : rows.heads])
        full = full[None, None] & whole[b % whole.shape[0], h % whole.shape[1], numbers]
    capacity = max(1, min(rows.capacity, active.shape[2] * active.shape[3]))
    lists = MaskLists.of_lists(
        compact(active, full, capacity),
        compact(active.swapaxes(-1, -2), full.swapaxes(-1, -2), capacity) if transpose else None,
        block_q=rows.grid.block_q,
        block_kv=rows.grid.block_kv,
        q_len=active.shape[2] * rows.grid.block_q,
        kv_len=active.shape[3] * rows.grid.block_kv,
        is_causal=False,
        density_hint=rows.density_hint,
    )
    return BlockMask.of(lists if numbers is None else with_bitmaps(lists, rows.bitmaps, numbers))
