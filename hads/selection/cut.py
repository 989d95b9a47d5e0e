"""Cut: which blocks compete for one count, and how many blocks of each row win.

By default all rows and heads of a layer compete. `Cut.shards` divides the count among shards of the sequence, so that
all of them have equally much to do: then the rows of a shard compete, over all heads.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, UInt

from xsake.hads.mask.lists.order import OrderName, shard_of_rows
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.keep import row_counts


@dataclasses.dataclass(frozen=True)
class Cut:
    """Shards of the sequence that get equal counts, or None; and the mesh axes over which heads are sharded."""

    shards: int | None = None
    order: OrderName = "contiguous"
    heads_axes: tuple[str, ...] = ()

    @property
    def axis_size(self) -> int:
        """Shards of the heads."""
        return math.prod(jax.lax.axis_size(name) for name in self.heads_axes)


TOGETHER = Cut()


def kept_per_row(
    order: UInt[Array, "B H n w"], count: Int[Array, "*counts"], grid: CausalGrid, cut: Cut
) -> Int[Array, "B H n"]:
    """How many entries each row keeps so that the largest are kept; entries that are 0 are never kept.

    `count` is one number over all heads, of every shard of `cut.heads_axes`; [H], one number per head; or, without
    shards of the sequence, [B, 1], one number per sequence.
    """
    b, h, n, w = order.shape
    if cut.shards is None:
        groups = count.shape[-1] if count.ndim else 1
        kept = row_counts(order.reshape(b, groups, -1, w), count, () if count.ndim else cut.heads_axes)
        return kept.reshape(b, h, n)
    rows, place = _rows_of_shards(n, cut.shards, cut.order)
    by_shard = jnp.pad(order, ((0, 0), (0, 0), (0, 1), (0, 0)))[:, :, rows.reshape(-1)]
    by_shard = by_shard.reshape(b, h, *rows.shape, w)
    bounds = _bounds(grid, cut.shards, cut.order)
    if count.ndim:
        kept = row_counts(by_shard, _equal_counts_of_heads(count, *bounds, cut.heads_axes))
    else:
        together = by_shard.swapaxes(1, 2).reshape(b, cut.shards, h * rows.shape[1], w)
        wanted = equal_counts(count, *(h * cut.axis_size * x for x in bounds))
        kept = row_counts(together, wanted, cut.heads_axes)
        kept = kept.reshape(b, cut.shards, h, rows.shape[1]).swapaxes(1, 2)
    return kept.reshape(b, h, rows.size)[..., place]


def equal_counts(
    total: Int[Array, "*heads"], least: Int[np.ndarray, "shards"], most: Int[np.ndarray, "shards"]
) -> Int[Array, "*heads shards"]:
    """Whole numbers that sum to each total, as equal as `least` and `most` of every shard allow.

    Units left by rounding go to one shard after the other, and from one total to the next.

    >>> import jax.numpy as jnp, numpy as np
    >>> equal_counts(jnp.array([14, 32, 32]), np.array([1, 1, 6]), np.array([9, 30, 30])).tolist()
    [[4, 4, 6], [9, 12, 11], [9, 11, 12]]
    """
    # The sum of clip(level, least, most) rises with the level; between these points it rises by `open` per step.
    points = np.sort(np.concatenate([least, most])).astype(np.int32)
    sums = np.clip(points[:, None], least, most).sum(-1).astype(np.int32)
    is_open = (least <= points[:, None]) & (points[:, None] < most)
    at = jnp.maximum(jnp.searchsorted(jnp.asarray(sums), total, side="right").astype(jnp.int32) - 1, 0)
    above = jnp.maximum(total - jnp.asarray(sums)[at], 0)
    number = jnp.asarray(np.maximum(is_open.sum(-1), 1).astype(np.int32))[at]
    level, left = jnp.asarray(points)[at] + above // number, above % number
    before = (jnp.cumsum(left.reshape(-1)) - left.reshape(-1)).reshape(left.shape)
    opened = jnp.asarray(is_open)[at]
    rank = jnp.cumsum(opened, -1, dtype=jnp.int32) - 1
    gets_one = opened & ((rank - before[..., None]) % number[..., None] < left[..., None])
    lead = (1,) * total.ndim
    low, high = (jnp.asarray(x, jnp.int32).reshape(*lead, -1) for x in (least, most))
    return jnp.clip(level[..., None], low, high) + gets_one.astype(jnp.int32)


def _equal_counts_of_heads(
    counts: Int[Array, "H"], least: np.ndarray, most: np.ndarray, axes: tuple[str, ...]
) -> Int[Array, "H shards"]:
    """`equal_counts` of each head. Units left by rounding go around all heads, on other devices too."""
    if not axes:
        return equal_counts(counts, least, most)
    first = jax.lax.axis_index(axes) * len(counts)
    every = equal_counts(jax.lax.all_gather(counts, axes, tiled=True), least, most)
    return jax.lax.dynamic_slice_in_dim(every, first, len(counts))


def _rows_of_shards(n: int, shards: int, order: OrderName) -> tuple[np.ndarray, np.ndarray]:
    """(i32[shards, most rows]: each shard's rows, `n` where a shard has fewer; i32[n]: the place of each row there)."""
    shard = shard_of_rows(n, shards, order)
    rows = np.full((shards, np.bincount(shard, minlength=shards).max()), n, np.int32)
    for s in range(shards):
        mine = np.flatnonzero(shard == s)
        rows[s, : len(mine)] = mine
    return rows, np.argsort(rows.reshape(-1), kind="stable")[:n].astype(np.int32)


def _bounds(grid: CausalGrid, shards: int, order: OrderName) -> tuple[np.ndarray, np.ndarray]:
    """(forced blocks, allowed blocks) of the rows of every shard, per head."""
    shard = shard_of_rows(grid.rows, shards, order)
    blocks = grid.forced().sum(-1), grid.causal().sum(-1)
    least, most = (np.bincount(shard, x, minlength=shards).astype(np.int32) for x in blocks)
    return least, most
