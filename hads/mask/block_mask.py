"""BlockMask: which blocks of keys each block of queries attends to, per head. Its fields are those of `MaskLists`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from xsake._ground.device import on_host, put_on_device
from xsake._ground.explicit import over_explicit_axes
from xsake._ground.integers import as_int32
from xsake.hads.mask import exported, file
from xsake.hads.mask.bitmaps import unpack
from xsake.hads.mask.grid import Grid, Window
from xsake.hads.mask.lists.mask_lists import BITMAPS, COLUMNS, ROWS, STATIC, MaskLists
from xsake.hads.mask.lists.order import Order
from xsake.hads.mask.lists.rows import ArrayT, put
from xsake.hads.mask.row_shards import RowShards

MeshAxes = str | tuple[str, ...] | None


@partial(exported.register, lists=ROWS + COLUMNS + BITMAPS, static=STATIC)
@partial(jax.tree_util.register_dataclass, data_fields=ROWS + COLUMNS + BITMAPS, meta_fields=STATIC)
class BlockMask(MaskLists):
    """Active blocks of attention, per head, with the index rule that holds inside them.

    An element attends iff its block is listed, the rule (`is_causal`, `local_window_size`) holds and, where the mask
    has bitmaps, its bit is set. Lists have shape [b, h, ...] with b = 1 or the batch and h = 1, the KV heads or the
    query heads. Contents are arrays: a new mask of the same capacity never retraces. `q_*` is the exact transpose,
    which gradients need; None for inference.

    Build one with `from_blocks`, `from_indices`, `from_token_indices`, `full` or a pattern of `xsake.patterns`.
    """

    # -- construction ------------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, lists: MaskLists) -> BlockMask:
        """The mask with these fields, its lists on the device where they are concrete and no jit traces."""
        mask = cls(**vars(lists))
        return mask if mask.traced else put_on_device(mask)

    @classmethod
    def from_blocks(
        cls,
        blocks: Array | np.ndarray,
        *,
        block_q: int,
        block_kv: int,
        q_len: int,
        kv_len: int,
        is_causal: bool = False,
        local_window_size: Window = None,
        capacity: int | None = None,
        transpose: bool = True,
        density_hint: float | None = None,
    ) -> BlockMask:
        """A mask from boolean blocks [nQ, nK], [H, nQ, nK] or [B, H, nQ, nK].

        Blocks that the index rule excludes are dropped. `capacity` is the number of list slots per head; by default the
        need rounded up to a power of two, or, under jit, all blocks that the rule allows. A mask that does not fit
        raises ValueError when concrete and makes attention return NaN when traced. `transpose=False` leaves out the
        lists that only gradients use.

        >>> import numpy as np
        >>> mask = BlockMask.from_blocks(np.eye(4, dtype=bool), block_q=64, block_kv=64, q_len=256, kv_len=256)
        >>> float(mask.density())
        0.25
        """
        grid = Grid.of(block_q, block_kv, q_len, kv_len, is_causal, local_window_size)
        traced = isinstance(blocks, jax.core.Tracer)
        if not traced:
            blocks = on_host(blocks)
        if blocks.dtype != np.bool_:
            raise TypeError(f"blocks must be boolean, got dtype {blocks.dtype}")
        if not 2 <= blocks.ndim <= 4:
            raise ValueError(f"blocks must be [nQ, nK], [H, nQ, nK] or [B, H, nQ, nK]; got shape {blocks.shape}")
        if blocks.shape[-2:] != (grid.num_q, grid.num_kv):
            raise ValueError(
                f"blocks.shape[-2:]={tuple(blocks.shape[-2:])} must be (nQ, nK)={(grid.num_q, grid.num_kv)} for "
                f"{q_len=}, {kv_len=}, {block_q=}, {block_kv=}"
            )
        if 0 in blocks.shape:
            raise ValueError(f"blocks must not be empty, got shape {blocks.shape}")
        allowed, full = grid.allowed_and_full()
        active = blocks.reshape((1,) * (4 - blocks.ndim) + blocks.shape) & allowed[None, None]
        options: dict[str, Any] = dict(capacity=capacity, transpose=transpose, density_hint=density_hint)

        def made(active: ArrayT) -> BlockMask:
            return cls.of(MaskLists.of_active(active, full, grid, **options, traced=traced))

        return over_explicit_axes(made, (active,), ("b h",), "b h")

    @classmethod
    def from_indices(
        cls,
        kv_indices: Array | np.ndarray,
        *,
        block_q: int,
        block_kv: int,
        q_len: int,
        kv_len: int,
        is_causal: bool = False,
        local_window_size: Window = None,
        capacity: int | None = None,
        transpose: bool = True,
        density_hint: float | None = None,
    ) -> BlockMask:
        """A mask from each row's KV block numbers, i32[nQ, M], [H, nQ, M] or [B, H, nQ, M], in any order.

        -1 means no block and a repeated number counts once. Numbers out of range raise ValueError when concrete and
        make attention return NaN when traced.

        >>> mask = BlockMask.from_indices([[0, -1], [0, 1]], block_q=64, block_kv=64, q_len=128, kv_len=128)
        >>> mask.to_blocks()[0, 0].tolist()
        [[True, False], [True, True]]
        """
        grid = Grid.of(block_q, block_kv, q_len, kv_len, is_causal, local_window_size)
        traced = isinstance(kv_indices, jax.core.Tracer)
        xp: Any = jnp if traced else np
        indices: Any = kv_indices if traced else on_host(kv_indices)
        if not np.issubdtype(indices.dtype, np.integer):
            raise TypeError(f"kv_indices must be integers, got dtype {indices.dtype}")
        if not 2 <= indices.ndim <= 4 or indices.shape[-2] != grid.num_q:
            raise ValueError(
                f"kv_indices must be [nQ, M], [H, nQ, M] or [B, H, nQ, M] with nQ={grid.num_q}; "
                f"got shape {indices.shape}"
            )
        indices = as_int32("kv_indices", indices)
        wrong = (indices < -1) | (indices >= grid.num_kv)
        if not traced and wrong.any():
            raise ValueError(
                f"kv_indices must be -1 (none) or in [0, {grid.num_kv}); got {indices[wrong][:4].tolist()} "
                f"at {np.argwhere(wrong)[:4].tolist()}"
            )

        def made(indices: ArrayT) -> BlockMask:
            wrong = (indices < -1) | (indices >= grid.num_kv)
            # One spare column swallows the -1s.
            column = xp.where(wrong | (indices < 0), grid.num_kv, indices)
            lead = np.indices(indices.shape, sparse=True)[:-1]
            blocks = put(xp, xp.zeros((*indices.shape[:-1], grid.num_kv + 1), bool), (*lead, column), True)
            mask = cls.from_blocks(
                blocks[..., :-1],
                block_q=block_q,
                block_kv=block_kv,
                q_len=q_len,
                kv_len=kv_len,
                is_causal=is_causal,
                local_window_size=local_window_size,
                capacity=capacity,
                transpose=transpose,
                density_hint=density_hint,
            )
            return mask.poisoned(wrong.any((-2, -1))) if traced else mask

        indices = indices.reshape((1,) * (4 - indices.ndim) + indices.shape)
        return over_explicit_axes(made, (indices,), ("b h",), "b h")

    @classmethod
    def from_token_indices(
        cls,
        block_indices: Array | np.ndarray,
        block_counts: int | Array | np.ndarray | None = None,
        *,
        block_kv: int,
        block_q: int = 16,
        kv_len: int | None = None,
        is_causal: bool = False,
        local_window_size: Window = None,
        capacity: int | None = None,
        transpose: bool = True,
        density_hint: float | None = None,
    ) -> BlockMask:
        """A mask from the KV block numbers that each query token has chosen, i32[B, T, K, n], in any order.

        -1 means no block, a repeated number counts once, and only the first `block_counts` (an int or i32[B, T, K])
        numbers of a token count. Blocks of `block_q` tokens list what any of them chose, with a bit per token. Numbers
        out of range raise ValueError when concrete and make attention return NaN when traced.

        >>> mask = BlockMask.from_token_indices([[[[0]], [[1]], [[1]], [[-1]]]], block_kv=2, block_q=2)
        >>> mask.to_elements()[0, 0].astype(int).tolist()
        [[1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]]
        """
        from xsake.hads.mask import token_selection

        q_len = np.shape(block_indices)[1] if np.ndim(block_indices) == 4 else 1
        grid = Grid.of(block_q, block_kv, q_len, q_len if kv_len is None else kv_len, is_causal, local_window_size)
        options: dict[str, Any] = dict(capacity=capacity, transpose=transpose, density_hint=density_hint)
        numbers = token_selection.numbers_that_count(block_indices, block_counts, grid.q_len)

        def made(numbers: ArrayT) -> BlockMask:
            return cls.of(token_selection.of_numbers(numbers, grid, **options))

        return over_explicit_axes(made, (numbers,), ("b t h",), "b h")

    @classmethod
    def full(
        cls,
        q_len: int,
        kv_len: int,
        *,
        block_q: int = 128,
        block_kv: int = 128,
        is_causal: bool = False,
        local_window_size: Window = None,
        transpose: bool = True,
    ) -> BlockMask:
        """Every block that the rule allows: dense attention, as a mask that all heads share."""
        grid = Grid.of(block_q, block_kv, q_len, kv_len, is_causal, local_window_size)
        return cls.from_blocks(
            np.ones((grid.num_q, grid.num_kv), bool),
            block_q=block_q,
            block_kv=block_kv,
            q_len=q_len,
            kv_len=kv_len,
            is_causal=is_causal,
            local_window_size=local_window_size,
            transpose=transpose,
        )

    # -- views ---------------------------------------------------------------------------------------------------------

    def to_elements(self) -> Array | np.ndarray:
        """Attending elements, bool[b, h, q_len, kv_len], the index rule applied. For small sizes and tests.

        What `to_blocks` says of masks that overflowed holds here, too.
        """
        elements = self.to_listed()
        offset = np.arange(self.kv_len)[None, :] - np.arange(self.q_len)[:, None]
        return elements & self.band.allows(offset[None, None])

    def to_listed(self) -> ArrayT:
        """`to_elements` without the index rule: the elements of listed blocks whose bits are set."""
        return over_explicit_axes(BlockMask._to_listed, (self,), ("b h",), "b h") if self.traced else self._to_listed()

    def _to_listed(self) -> ArrayT:
        xp: Any = jnp if self.traced else np
        if self.bitmaps is None:
            elements = xp.repeat(xp.repeat(self.to_blocks(), self.block_q, -2), self.block_kv, -1)
            return elements[..., : self.q_len, : self.kv_len]
        bits = unpack(xp, self.read(self.bitmaps), self.block_q, self.block_kv)
        b, h = (x[..., None] for x in np.ogrid[: self.batch, : self.heads])
        of_slots = bits[b if bits.shape[0] > 1 else 0 * b, h if bits.shape[1] > 1 else 0 * h, self.read(self.kv_bitmap)]
        elements = self.by_block(of_slots, False).swapaxes(3, 4)
        elements = elements.reshape(self.batch, self.heads, self.num_q_blocks * self.block_q, -1)
        return elements[..., : self.q_len, : self.kv_len]

    def union(self, other: BlockMask, *, capacity: int | None = None) -> BlockMask:
        """Elements that attend in either mask; also `mask | other`.

        Block sizes and lengths must be equal; batch and heads broadcast, and the masks may differ in rule and have
        bitmaps. The result has bitmaps where blocks and a rule cannot say which elements attend. A mask that overflowed
        its capacity raises ValueError when concrete, and the result stays NaN when traced.

        >>> from xsake import patterns
        >>> window = patterns.sliding_window(4, 4, window=(1, 0), block_q=2, block_kv=2)
        >>> first_keys = patterns.from_function(4, 4, lambda i, j: (j == 0) & (i >= 0), block_q=2, block_kv=2)
        >>> (window | first_keys).to_elements()[0, 0].astype(int).tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
        """
        from xsake.hads.mask.combine import union

        return _combined(union, self, other, capacity)

    def intersection(self, other: BlockMask, *, capacity: int | None = None) -> BlockMask:
        """Elements that attend in both masks; also `mask & other`. What `union` says of masks holds here, too."""
        from xsake.hads.mask.combine import intersection

        return _combined(intersection, self, other, capacity)

    __or__ = union
    __and__ = intersection

    def partition_spec(self, batch: MeshAxes = None, heads: MeshAxes = None) -> BlockMask:
        """This mask's tree with a PartitionSpec at every array: `in_specs` for `jax.shard_map` over batch and heads.

        A dimension of size 1 is shared by all shards and stays replicated.
        """

        def spec(x: Any) -> PartitionSpec:
            lead = (batch if x.shape[0] > 1 else None, heads if x.shape[1] > 1 else None)
            return PartitionSpec(*lead, *(None,) * (x.ndim - 2))

        return jax.tree.map(spec, self)

    def shard_rows(self, shards: int, *, order: str = "contiguous", capacity: int | None = None) -> RowShards:
        """The rows of each shard of a sequence, with lists of their own: for `xsake.sharded_attention`.

        `order` says how the sequence lies on the shards: "contiguous", or "zigzag", which gives all shards as many
        early as late rows. Blocks are never cut. `capacity` is the number of list slots per shard and head; by default
        the need, or, under jit, all blocks that the rule allows to a shard.

        >>> mask = BlockMask.full(1024, 1024, block_q=64, block_kv=64, is_causal=True)
        >>> mask.shard_rows(4).blocks_walked().tolist(), mask.shard_rows(4, order="zigzag").blocks_walked().tolist()
        ([10, 26, 42, 58], [34, 34, 34, 34])
        """
        in_order = Order.of(shards, order)
        if not self.traced:
            return RowShards.of(self, in_order, capacity)

        def lists(mask: BlockMask) -> RowShards:
            return dataclasses.replace(RowShards.of(mask, in_order, capacity), bitmaps=None)

        return dataclasses.replace(over_explicit_axes(lists, (self,), ("b h",), "n b h"), bitmaps=self.bitmaps)

    # -- files and pictures --------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike) -> None:
        """Write one .npz file (no pickle), atomically."""
        file.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike, *, most_bytes: int = file.MOST_BYTES) -> BlockMask:
        """Read a file that `save` wrote. The file may come from anywhere: what `from_blocks` would not make raises
        ValueError, and so does a file that unpacks to more than `most_bytes` bytes, before it is unpacked.
        """
        return cls.of(file.load(path, most_bytes))

    def __str__(self) -> str:
        from xsake.hads.mask import picture

        return picture.draw(self)


def _combined(how: Callable[..., MaskLists], a: BlockMask, b: BlockMask, capacity: int | None) -> BlockMask:
    from xsake.hads.mask.combine import check

    check(a, b)

    def made(a: BlockMask, b: BlockMask) -> BlockMask:
        return BlockMask.of(how(a, b, capacity))

    for mask in (a, b):
        mask.incomplete_heads()  # raises where a concrete mask lacks blocks, which no device can tell of its part
    return over_explicit_axes(made, (a, b), ("b h", "b h"), "b h") if a.traced or b.traced else made(a, b)
