"""BlockMask: which blocks of keys each block of queries attends to, per head, as compressed rows.

For one head of a causal mask with 4 blocks a side and blocks (0,0) (1,1) (2,0) (2,2) (3,0) (3,3) active:

    kv_row_ptr  = [0, 1, 2, 4, 6]
    kv_indices  = [0,  1,  0, 2,  0, 3,  3, 3]      row 2 is kv_indices[2:4]; the last two slots are padding
    kv_num_full = [0, 0, 1, 1]                      block (2,0) lies below the diagonal: no element test
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from xsake._ground.buckets import density_bucket, power_of_two_at_least
from xsake._ground.device import on_host, put_on_device
from xsake.hads.mask import exported
from xsake.hads.mask.band import Band
from xsake.hads.mask.bitmaps import unpack
from xsake.hads.mask.grid import Grid, Window
from xsake.hads.mask.lists.rows import ArrayT, compress, finished, put, rows_of_slots

if TYPE_CHECKING:
    from xsake.hads.mask.row_shards import RowShards

_ROWS = ("kv_indices", "kv_row_ptr", "kv_num_full", "row_order")
_COLUMNS = ("q_indices", "q_row_ptr", "q_num_full", "col_order")
_BITMAPS = ("bitmaps", "kv_bitmap", "q_bitmap")
_STATIC = ("block_q", "block_kv", "q_len", "kv_len", "is_causal", "local_window_size", "density_hint", "complete")


@partial(exported.register, lists=_ROWS + _COLUMNS + _BITMAPS, static=_STATIC)
@partial(jax.tree_util.register_dataclass, data_fields=_ROWS + _COLUMNS + _BITMAPS, meta_fields=_STATIC)
@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BlockMask:
    """Active blocks of attention, per head, with the index rule that holds inside them.

    An element attends iff its block is listed, the rule (`is_causal`, `local_window_size`) holds and, where the mask
    has bitmaps, its bit is set. Lists have shape [b, h, ...] with b = 1 or the batch and h = 1, the KV heads or the
    query heads. Contents are arrays: a new mask of the same capacity never retraces. `q_*` is the exact transpose,
    which gradients need; None for inference.

    Build one with `from_blocks`, `from_indices`, `from_token_indices`, `full` or a pattern of `xsake.patterns`.
    """

    kv_indices: Any
    kv_row_ptr: Any
    kv_num_full: Any
    q_indices: Any
    q_row_ptr: Any
    q_num_full: Any
    row_order: Any
    col_order: Any
    block_q: int
    block_kv: int
    q_len: int
    kv_len: int
    is_causal: bool
    local_window_size: tuple[int | None, int | None] | None
    density_hint: float | None
    complete: bool  # known not to have overflowed its capacity; False where only the contents tell (`overflowed`)
    # Which elements of a block attend: bit r % 32 of bitmaps[.., n, c, r // 32] is row r and column c of bitmap n, and
    # kv_bitmap (q_bitmap) is n for each slot of kv_indices (q_indices). One column stands for all: a bit per row.
    bitmaps: Any = None
    kv_bitmap: Any = None
    q_bitmap: Any = None

    # -- construction ------------------------------------------------------------------------------------------------

    @classmethod
    def from_blocks(
        cls,
        blocks: Any,
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
        mask = cls.of_active(
            active, full, grid, capacity=capacity, transpose=transpose, density_hint=density_hint, traced=traced
        )
        return mask.on_device()

    @classmethod
    def of_active(
        cls,
        active: ArrayT,
        full: ArrayT,
        grid: Grid,
        *,
        capacity: int | None,
        transpose: bool,
        density_hint: float | None,
        traced: bool,
    ) -> BlockMask:
        """The lists of `active` blocks, bool[b, h, nQ, nK], all of which the rule allows; numpy arrays unless traced.

        `full`, [nQ, nK] or like `active`, says which of them need no test of elements.
        """
        xp: Any = jnp if traced else np
        num_allowed = grid.num_allowed
        if not traced:
            per_head = active.sum((-2, -1))
            need = int(per_head.max())
            if capacity is None:
                capacity = min(power_of_two_at_least(need), max(num_allowed, 1))
            elif need > capacity:
                b, h = np.unravel_index(int(per_head.argmax()), per_head.shape)
                raise ValueError(
                    f"{capacity=} is too small: batch {b}, head {h} has {need} active blocks; "
                    f"pass capacity>={need} (or None)"
                )
            if density_hint is None:
                density_hint = density_bucket(float(per_head.mean()) / max(num_allowed, 1))
        elif capacity is None:
            capacity = max(num_allowed, 1)
        if capacity < 1:
            raise ValueError(f"{capacity=} must be at least 1")

        rows = compress(xp, active, full, capacity)
        columns = compress(xp, active.swapaxes(-1, -2), full.swapaxes(-1, -2), capacity) if transpose else (None,) * 4
        lists: dict[str, Any] = dict(zip(_ROWS + _COLUMNS, rows + columns, strict=True))
        complete = not traced or capacity >= num_allowed
        return cls(**lists, **dataclasses.asdict(grid), density_hint=density_hint, complete=complete)

    def on_device(self) -> BlockMask:
        """This mask, with its lists on the device where they are concrete and no jit traces (`put_on_device`)."""
        return self if self.traced else put_on_device(self)

    @classmethod
    def of_lists(cls, rows: tuple[ArrayT, ...], columns: tuple[ArrayT, ...] | None = None, **options: Any) -> BlockMask:
        """A traced mask from lists as `compact.compact` makes them; without `columns`, for inference only."""
        return cls.of_finished(finished(jnp, *rows), finished(jnp, *columns) if columns else None, **options)

    @classmethod
    def of_finished(
        cls,
        rows: tuple[ArrayT, ...],
        columns: tuple[ArrayT, ...] | None = None,
        *,
        density_hint: float | None = None,
        local_window_size: Window = None,
        **grid: Any,
    ) -> BlockMask:
        """`of_lists`, from lists as `lists.finished` makes them."""
        checked = Grid.of(**grid, window=local_window_size)
        names: dict[str, Any] = dict(zip(_ROWS + _COLUMNS, rows + (columns or (None,) * 4), strict=True))
        complete = rows[0].shape[-1] >= checked.num_allowed
        return cls(**names, **dataclasses.asdict(checked), density_hint=density_hint, complete=complete)

    @classmethod
    def from_indices(
        cls,
        kv_indices: Any,
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
        wrong = (indices < -1) | (indices >= grid.num_kv)
        if not traced and wrong.any():
            raise ValueError(
                f"kv_indices must be -1 (none) or in [0, {grid.num_kv}); got {indices[wrong][:4].tolist()} "
                f"at {np.argwhere(wrong)[:4].tolist()}"
            )
        # One spare column swallows the -1s.
        column = xp.where(wrong | (indices < 0), grid.num_kv, indices)
        shape = (*indices.shape[:-1], grid.num_kv + 1)
        lead = np.indices(indices.shape, sparse=True)[:-1]
        blocks = put(xp, xp.zeros(shape, bool), (*lead, column), True)
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
        if not traced:
            return mask
        bad = wrong.any().astype(jnp.int32)
        row_ptr = mask.kv_row_ptr.at[..., -1].add(bad * (mask.capacity + 1))
        return dataclasses.replace(mask, kv_row_ptr=row_ptr, complete=False)

    @classmethod
    def from_token_indices(
        cls,
        block_indices: Any,
        block_counts: Any = None,
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
        from xsake.hads.mask.token_selection import from_token_indices

        q_len = np.shape(block_indices)[1] if np.ndim(block_indices) == 4 else 1
        grid = Grid.of(block_q, block_kv, q_len, q_len if kv_len is None else kv_len, is_causal, local_window_size)
        return from_token_indices(
            block_indices, block_counts, grid, capacity=capacity, transpose=transpose, density_hint=density_hint
        )

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

    # -- shape ---------------------------------------------------------------------------------------------------------

    @property
    def batch(self) -> Any:  # an int, or a dimension variable of jax.export
        return self.kv_indices.shape[0]

    @property
    def heads(self) -> int:
        return self.kv_indices.shape[1]

    @property
    def capacity(self) -> int:
        return self.kv_indices.shape[2]

    @property
    def most_density(self) -> float:
        """What the lists have room for: an upper bound of the density that is known while tracing."""
        return min(1.0, self.capacity / max(self.grid.num_allowed, 1))

    @property
    def num_q_blocks(self) -> int:
        return -(-self.q_len // self.block_q)

    @property
    def num_kv_blocks(self) -> int:
        return -(-self.kv_len // self.block_kv)

    @property
    def band(self) -> Band:
        return Band.of(self.is_causal, self.local_window_size)

    @property
    def has_transpose(self) -> bool:
        return self.q_indices is not None

    @property
    def grid(self) -> Grid:
        return Grid(self.block_q, self.block_kv, self.q_len, self.kv_len, self.is_causal, self.local_window_size)

    @property
    def traced(self) -> bool:
        return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(self))

    def read(self, lists: ArrayT) -> ArrayT:
        """Lists on the host where they are concrete: an explicit transfer, which `jax.transfer_guard` allows."""
        return jnp.asarray(lists) if self.traced else on_host(lists)

    def overflowed(self) -> ArrayT:
        """bool[b, h]: the blocks did not fit the capacity, or were out of range: possible if built under jit."""
        return self.read(self.kv_row_ptr)[..., -1] > self.capacity

    # -- views ---------------------------------------------------------------------------------------------------------

    def to_blocks(self) -> ArrayT:
        """Active blocks, bool[b, h, nQ, nK]: the inverse of `from_blocks` (after its rule)."""
        xp: Any = jnp if self.traced else np
        ptr, indices = self.read(self.kv_row_ptr), self.read(self.kv_indices)
        b, h = np.ogrid[: self.batch, : self.heads]
        row = rows_of_slots(xp, ptr, self.capacity)  # slots past the last entry land in a spare row
        shape = (self.batch, self.heads, self.num_q_blocks + 1, self.num_kv_blocks)
        where = (b[..., None], h[..., None], row, indices)
        return put(xp, xp.zeros(shape, bool), where, True)[..., :-1, :]

    def to_elements(self) -> ArrayT:
        """Attending elements, bool[b, h, q_len, kv_len], the index rule applied. For small sizes and tests."""
        elements = self.to_listed()
        offset = np.arange(self.kv_len)[None, :] - np.arange(self.q_len)[:, None]
        return elements & self.band.allows(offset[None, None])

    def to_listed(self) -> ArrayT:
        """`to_elements` without the index rule: the elements of listed blocks whose bits are set."""
        xp: Any = jnp if self.traced else np
        if self.bitmaps is None:
            elements = xp.repeat(xp.repeat(self.to_blocks(), self.block_q, -2), self.block_kv, -1)
            return elements[..., : self.q_len, : self.kv_len]
        ptr, indices = self.read(self.kv_row_ptr), self.read(self.kv_indices)
        bits = unpack(xp, self.read(self.bitmaps), self.block_q, self.block_kv)
        b, h = (x[..., None] for x in np.ogrid[: self.batch, : self.heads])
        row = rows_of_slots(xp, ptr, self.capacity)
        number = self.read(self.kv_bitmap)
        of_slots = bits[b if bits.shape[0] > 1 else 0 * b, h if bits.shape[1] > 1 else 0 * h, number]
        shape = (self.batch, self.heads, self.num_q_blocks + 1, self.num_kv_blocks, self.block_q, self.block_kv)
        blocks = put(xp, xp.zeros(shape, bool), (b, h, row, indices), of_slots)[:, :, :-1]
        elements = blocks.swapaxes(3, 4).reshape(self.batch, self.heads, shape[2] * self.block_q - self.block_q, -1)
        return elements[..., : self.q_len, : self.kv_len]

    def density(self, *, per_head: bool = False) -> Any:
        """Active blocks over the blocks that the rule allows: one number, or [b, h] with `per_head=True`."""
        per = self.read(self.kv_row_ptr)[..., -1] / max(self.grid.num_allowed, 1)
        return per if per_head else per.mean()

    def union(self, other: BlockMask, *, capacity: int | None = None) -> BlockMask:
        """Blocks active in either mask; shapes broadcast over batch and heads, rules must be equal."""
        return self._combine(other, lambda a, b: a | b, capacity)

    def intersection(self, other: BlockMask, *, capacity: int | None = None) -> BlockMask:
        """Blocks active in both masks; shapes broadcast over batch and heads, rules must be equal."""
        return self._combine(other, lambda a, b: a & b, capacity)

    __or__ = union
    __and__ = intersection

    def _combine(self, other: BlockMask, op: Callable, capacity: int | None) -> BlockMask:
        if self.grid != other.grid:
            raise ValueError(f"masks must have the same blocks, lengths and rule: {self.grid} and {other.grid}")
        if self.bitmaps is not None or other.bitmaps is not None:
            raise NotImplementedError(
                "masks with bitmaps, which choose single elements, cannot be united or intersected: combine the "
                "functions or the selections that they were made from"
            )
        return BlockMask.from_blocks(
            op(self.to_blocks(), other.to_blocks()),
            **dataclasses.asdict(self.grid),
            capacity=capacity,
            transpose=self.has_transpose and other.has_transpose,
        )

    def partition_spec(self, batch: Any = None, heads: Any = None) -> BlockMask:
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
        from xsake.hads.mask.lists.order import Order
        from xsake.hads.mask.row_shards import RowShards

        return RowShards.of(self, Order.of(shards, order), capacity)

    # -- files and pictures --------------------------------------------------------------------------------------------

    def save(self, path: Any) -> None:
        """Write one .npz file (no pickle), atomically."""
        from xsake.hads.mask import file

        file.save(self, path)

    @classmethod
    def load(cls, path: Any) -> BlockMask:
        """Read a file that `save` wrote."""
        from xsake.hads.mask import file

        return file.load(path)

    def __repr__(self) -> str:
        rule = "causal" if self.is_causal else "no causal rule"
        if self.local_window_size is not None:
            rule += f", window {self.local_window_size}"
        try:
            shape = f"batch {self.batch}, heads {self.heads}, capacity {self.capacity}"
            shape += "" if self.bitmaps is None else f", {self.bitmaps.shape[2]} bitmaps"
        except (AttributeError, IndexError, TypeError):  # a tree of specs or of shapes
            shape = "no arrays"
        return (
            f"BlockMask({self.q_len} x {self.kv_len}, blocks {self.block_q} x {self.block_kv}, {rule}, {shape}"
            f"{'' if self.has_transpose else ', inference only'})"
        )

    def __str__(self) -> str:
        from xsake.hads.mask import picture

        return picture.draw(self)
