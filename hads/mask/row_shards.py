"""A mask cut by rows: what each shard of a sequence attends to."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from xsake._ground.device import on_host, put_on_device
from xsake.hads.mask.grid import Grid
from xsake.hads.mask.lists.mask_lists import MaskLists
from xsake.hads.mask.lists.order import Order
from xsake.hads.mask.lists.overflow import MayOverflow
from xsake.hads.mask.lists.rows import by_block, rows_of_slots


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("kv_indices", "kv_row_ptr", "bitmaps", "kv_bitmap"),
    meta_fields=("grid", "order", "density_hint", "complete"),
)
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RowShards(MayOverflow):
    """The rows of a `BlockMask`, shard after shard, each with lists of its own. Made by `BlockMask.shard_rows`.

    The lists are those of the mask with a leading axis of shards: kv_indices [n, b, h, capacity] and kv_row_ptr
    [n, b, h, rows + 1]. A shard's rows stand as `order` lays them on the shard; rows past the end are empty. The
    numbers of key blocks are those of the mask. A mask's `bitmaps` are whole on every shard, and `kv_bitmap` lies like
    kv_indices. In a `jax.shard_map` with `partition_spec`, n is 1: the shard's own.
    """

    kv_indices: Any
    kv_row_ptr: Any
    grid: Grid
    order: Order
    density_hint: float | None
    complete: bool
    bitmaps: Any = None
    kv_bitmap: Any = None

    @classmethod
    def of(cls, mask: MaskLists, order: Order, capacity: int | None) -> RowShards:
        grid, incomplete = mask.grid, mask.incomplete_heads()
        count = -(-grid.num_q // order.pieces) * order.pieces
        rows = np.minimum(order.blocks(count), grid.num_q)  # [n, rows]; one spare row stands for all past the end
        traced = mask.traced
        xp: Any = jnp if traced else np
        ptr, indices = mask.read(mask.kv_row_ptr), mask.read(mask.kv_indices)
        start = xp.moveaxis(ptr[..., rows], 2, 0)
        length = xp.moveaxis(xp.diff(ptr, append=ptr[..., -1:], axis=-1)[..., rows], 2, 0)
        row_ptr = xp.concatenate([xp.zeros_like(length[..., :1]), xp.cumsum(length, -1)], -1).astype(np.int32)
        need = int(row_ptr[..., -1].max()) if not traced else grid.most_in_rows(rows)
        if capacity is None:
            capacity = max(1, min(need, mask.capacity))
        elif not traced and need > capacity:
            raise ValueError(f"{capacity=} is too small: a shard has {need} blocks; pass capacity>={need} (or None)")
        slot = np.arange(capacity, dtype=np.int32)
        row = xp.minimum(rows_of_slots(xp, row_ptr, capacity), rows.shape[1] - 1)
        source = xp.take_along_axis(start - row_ptr[..., :-1], row, -1) + slot[None, None, None]
        source = xp.clip(source, 0, mask.capacity - 1)

        def of_shards(lists: Any) -> Any:
            every = xp.broadcast_to(lists[None], (order.shards, *lists.shape))
            return xp.take_along_axis(every, source, -1).astype(np.int32)

        shards = cls(
            kv_indices=of_shards(indices),
            kv_row_ptr=row_ptr,
            grid=grid,
            order=order,
            density_hint=mask.density_hint,
            complete=not traced or capacity >= need,
            bitmaps=mask.bitmaps,
            kv_bitmap=None if mask.bitmaps is None else of_shards(mask.read(mask.kv_bitmap)),
        )
        if incomplete is not None:  # what did not fit the mask does not fit its parts either
            return shards.poisoned(incomplete)
        return shards if traced else put_on_device(shards)

    @property
    def batch(self) -> int:
        return self.kv_indices.shape[1]

    @property
    def heads(self) -> int:
        return self.kv_indices.shape[2]

    @property
    def rows(self) -> int:
        """Query blocks of a shard, those past the end included."""
        return self.kv_row_ptr.shape[3] - 1

    @property
    def columns(self) -> int:
        """Key blocks of a shard, those past the end included."""
        return -(-self.grid.num_kv // self.order.pieces) * (self.order.pieces // self.order.shards)

    def blocks_walked(self) -> Any:
        """i32[n]: the blocks in each shard's lists, over all batches and heads."""
        self.incomplete_heads()
        return self.kv_row_ptr[..., -1].sum((1, 2))

    def most_to_send(self, kv_heads: int) -> int:
        """The most blocks that one shard needs of another for one of `kv_heads` K/V heads. The lists are concrete."""
        self.incomplete_heads()
        indices, ptr = on_host(self.kv_indices), on_host(self.kv_row_ptr)
        used = np.arange(self.capacity) < ptr[..., -1:]
        total = self.columns * self.order.shards
        place = self.order.places(total)[indices]
        by_head = np.zeros((self.order.shards, self.heads, total + 1), bool)
        shard, _, head, _ = np.ogrid[tuple(map(slice, indices.shape))]
        by_head[shard, head, np.where(used, place, total)] = True
        shape = (self.order.shards, min(self.heads, kv_heads), -1, self.order.shards, self.columns)
        need = by_head[..., :-1].reshape(shape).any(2)  # [asking shard, K/V head, holder, its blocks]
        need[np.arange(self.order.shards), :, np.arange(self.order.shards)] = False
        return int(need.sum(-1).max())

    def partition_spec(self, sequence: Any = None, batch: Any = None, heads: Any = None) -> RowShards:
        """This tree with a PartitionSpec at every array: `in_specs` for `jax.shard_map`."""

        def lead(b: int, h: int) -> tuple[Any, Any]:
            return batch if b > 1 else None, heads if h > 1 else None

        specs = jax.tree.map(lambda x: PartitionSpec(sequence, *lead(*x.shape[1:3]), None), self)
        if self.bitmaps is None:
            return specs
        return dataclasses.replace(specs, bitmaps=PartitionSpec(*lead(*self.bitmaps.shape[:2])))

    # -- inside a shard, where n is 1 ----------------------------------------------------------------------------------

    def to_blocks(self) -> Any:
        """This shard's active blocks, bool[b, h, rows, all columns], the columns as the keys lie on the shards."""
        return self._by_block(jnp.ones(self.kv_indices.shape[1:], bool), False)

    def bitmap_numbers(self) -> Any:
        """i32[b, h, rows, all columns]: the bitmap of each of this shard's active blocks, placed as by `to_blocks`."""
        return self._by_block(self.kv_bitmap[0], 0)

    def _by_block(self, of_slots: Any, absent: Any) -> Any:
        total = self.columns * self.order.shards
        column = jnp.asarray(self.order.places(total))[self.kv_indices[0]]
        return by_block(jnp, total, absent, self.kv_row_ptr[0], column, of_slots)
