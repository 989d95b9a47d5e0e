"""The record of a BlockMask: its compressed rows, their transpose, bitmaps and the index rule.

For one head of a causal mask with 4 blocks a side and blocks (0,0) (1,1) (2,0) (2,2) (3,0) (3,3) active:

    kv_row_ptr  = [0, 1, 2, 4, 6]
    kv_indices  = [0,  1,  0, 2,  0, 3,  3, 3]      row 2 is kv_indices[2:4]; the last two slots are padding
    kv_num_full = [0, 0, 1, 1]                      block (2,0) lies below the diagonal: no element test
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake._ground.buckets import density_bucket, power_of_two_at_least
from xsake._ground.explicit import over_explicit_axes
from xsake.hads.mask.band import Band
from xsake.hads.mask.grid import Grid, Window
from xsake.hads.mask.lists.overflow import MayOverflow
from xsake.hads.mask.lists.rows import ArrayT, by_block, compress, finished

ROWS = ("kv_indices", "kv_row_ptr", "kv_num_full", "row_order")
COLUMNS = ("q_indices", "q_row_ptr", "q_num_full", "col_order")
BITMAPS = ("bitmaps", "kv_bitmap", "q_bitmap")
STATIC = ("block_q", "block_kv", "q_len", "kv_len", "is_causal", "local_window_size", "density_hint", "complete")


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MaskLists(MayOverflow):
    """The fields of a `BlockMask`, which users hold, and what is computed from them alone."""

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
    complete: bool
    # Which elements of a block attend: bit r % 32 of bitmaps[.., n, c, r // 32] is row r and column c of bitmap n, and
    # kv_bitmap (q_bitmap) is n for each slot of kv_indices (q_indices). One column stands for all: a bit per row.
    bitmaps: Any = None
    kv_bitmap: Any = None
    q_bitmap: Any = None

    # -- construction ------------------------------------------------------------------------------------------------

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
    ) -> Self:
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
        lists: dict[str, Any] = dict(zip(ROWS + COLUMNS, rows + columns, strict=True))
        complete = not traced or capacity >= num_allowed
        return cls(**lists, **dataclasses.asdict(grid), density_hint=density_hint, complete=complete)

    @classmethod
    def of_lists(cls, rows: tuple[ArrayT, ...], columns: tuple[ArrayT, ...] | None = None, **options: Any) -> Self:
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
    ) -> Self:
        """`of_lists`, from lists as `lists.rows.finished` makes them."""
        checked = Grid.of(**grid, window=local_window_size)
        names: dict[str, Any] = dict(zip(ROWS + COLUMNS, rows + (columns or (None,) * 4), strict=True))
        complete = rows[0].shape[-1] >= checked.num_allowed
        return cls(**names, **dataclasses.asdict(checked), density_hint=density_hint, complete=complete)

    # -- shape -------------------------------------------------------------------------------------------------------

    @property
    def batch(self) -> Any:  # an int, or a dimension variable of jax.export
        return self.kv_indices.shape[0]

    @property
    def heads(self) -> int:
        return self.kv_indices.shape[1]

    @property
    def most_density(self) -> float:
        """What the lists have room for: an upper bound of the density that is known while tracing."""
        return min(1.0, self.capacity / max(self.grid.num_allowed, 1))

    @property
    def num_q_blocks(self) -> int:
        return self.grid.num_q

    @property
    def num_kv_blocks(self) -> int:
        return self.grid.num_kv

    @property
    def band(self) -> Band:
        return self.grid.band

    @property
    def has_transpose(self) -> bool:
        return self.q_indices is not None

    @property
    def grid(self) -> Grid:
        return Grid(self.block_q, self.block_kv, self.q_len, self.kv_len, self.is_causal, self.local_window_size)

    # -- contents ----------------------------------------------------------------------------------------------------

    def by_block(self, of_slots: ArrayT, absent: Any) -> ArrayT:
        """[b, h, nQ, nK, ...]: the entry of `of_slots` [b, h, N, ...] for each listed block, `absent` elsewhere.

        ValueError if a concrete mask overflowed; in a traced one, `incomplete_heads` says which heads lack blocks.
        """
        self.incomplete_heads()
        lists = self.read(self.kv_row_ptr), self.read(self.kv_indices), of_slots
        put = partial(by_block, jnp if self.traced else np, self.num_kv_blocks, absent)
        return over_explicit_axes(put, lists, ("b h",) * 3, "b h")

    def to_blocks(self) -> Array | np.ndarray:
        """Active blocks, bool[b, h, nQ, nK]: the inverse of `from_blocks` (after its rule).

        A mask that overflowed raises ValueError when concrete; when traced, its heads in `overflowed()` lack blocks.
        """
        return self.by_block((jnp if self.traced else np).ones(self.kv_indices.shape, bool), False)

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
