"""HADS inside a forward: the mask of a layer from its queries and keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake._ground.buckets import density_bucket
from xsake._ground.programs import newest_programs
from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.mask.lists.order import Order, OrderName
from xsake.hads.profile.budgets import head_counts, layer_counts, threshold
from xsake.hads.profile.by_length import kept_by_length
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.selection.cut import TOGETHER, Cut
from xsake.hads.selection.devices.explicit_axes import over_explicit_axes
from xsake.hads.selection.devices.heads_of_shard import divides, heads_of_shard
from xsake.hads.selection.given import Given
from xsake.hads.selection.packed import segments_of
from xsake.hads.selection.program import chosen

Mode = Literal["exact", "elastic", "static"]


def select(
    query: Array | np.ndarray,
    key: Array | np.ndarray,
    profile: HadsProfile,
    budget: float | Array | np.ndarray,
    *,
    layer: int,
    mode: Mode = "exact",
    per: Literal["query_head", "kv_head"] = "query_head",
    capacity: int | None = None,
    transpose: bool = True,
    density_hint: float | None = None,
    shards: int | None = None,
    order: OrderName = "contiguous",
    heads_axis: str | tuple[str, ...] | None = None,
    segment_ids: Any = None,
    spare: float = 1.0,
) -> BlockMask:
    """The causal mask of one layer that keeps the model closest to itself at a budget.

    Estimates every block's attention mass from pooled queries and keys, and keeps the blocks that save most of Σ ω δ²
    (`selection.gain`) over all rows and heads of the layer. Works under jit with static shapes and no host round trip,
    and in a gradient, for which the mask is a constant. Query and key may be sharded over batch and heads, by automatic
    or by explicit mesh axes: under jit the mask is sharded alike. It is the mask of one device, block for block.

    Args:
      query: the layer's queries [B, T, H, D], rotary positions applied.
      key: the layer's keys [B, T, K, D], rotary positions applied.
      profile: of this model, from `hads.calibrate`.
      budget: a share of the model's causal blocks (0.2 is 20%), or the counts that `hads.layer_counts` gives for it,
        i32[L] (in the static mode `hads.head_counts`, [L, H]), which may be traced: new counts do not recompile.
      layer: this layer's number.
      mode: "exact" keeps the layer's share of the budget on every input, to the block; "elastic" keeps the
        blocks above a gain that keeps the budget on average, so that density follows the input (`budget` must be a
        float); "static" keeps an exact number per head, fixed by calibration.
      per: one mask per query head, or one per KV head, which its query heads share.
      capacity: list slots per head; by default all causal blocks, which always suffice.
      transpose: whether gradients will be needed.
      density_hint: the budget that counts were made from, by which attention looks up its tuned configuration; counts
        may be traced and cannot say. The hint is static: one in another half octave recompiles.
      shards: of the sequence, each of which gets an equal part of the count over all heads ("static": of every head's
        count), as far as its forced and its causal blocks allow. The layer's count stays exact.
      order: which rows of blocks a shard holds: "contiguous", or "zigzag", where the sequence is cut in twice as many
        parts and shard s of n holds parts s and 2 n - 1 - s. All shards then have equally many causal blocks, so that
        their counts are equal to one block if the rows divide. Query and key are in the sequence's own order.
      heads_axis: only inside `jax.shard_map`: the mesh axis, or axes, over which the caller has sharded the heads.
        Query is the shard's part, key its part or all KV heads; the profile is the whole model's, the mask the shard's.
      segment_ids: of documents that are packed into the sequence, [B, T] or [1, T]. Each document then chooses among
        its own blocks, and keeps as many as if it stood alone: `budget`, a float, is a share of these. A row of blocks
        that holds parts of two documents counts as the former's. The choice is made by XLA.
      spare: with segment_ids: a document keeps at least so many times the blocks that are always on in it.

    Raises ValueError for a profile of other heads, a layer that the profile does not have, queries and keys of
    different lengths, and a budget that does not cover the forced blocks. Lengths beyond calibration are served:
    `HadsProfile` says how.
    """
    axes = () if heads_axis is None else (heads_axis,) if isinstance(heads_axis, str) else tuple(heads_axis)
    grid = check_inputs(query, key, profile, layer, axes)
    if mode not in ("exact", "elastic", "static"):
        raise ValueError(f'{mode=} must be "exact", "elastic" or "static"')
    if per not in ("query_head", "kv_head"):
        raise ValueError(f'{per=} must be "query_head" or "kv_head"')
    if capacity is not None and capacity < 1:
        raise ValueError(f"{capacity=} must be at least 1")
    heads = profile.q_heads if per == "query_head" else profile.kv_heads
    cut = dataclasses.replace(_cut(shards, order, mode), heads_axes=axes)
    if not divides(profile.q_heads, profile.kv_heads, heads, cut.axis_size):
        raise ValueError(
            f"{heads_axis=} has {cut.axis_size} shards, which cut KV heads or masks in parts: there are "
            f"{profile.q_heads} query heads, {profile.kv_heads} KV heads and {heads} masks"
        )
    segments = None
    if segment_ids is None:
        if spare != 1:
            raise ValueError(f"{spare=} is for packed documents: give segment_ids, or leave spare out")
        kept = _kept(profile, budget, mode, heads, grid.length, profile.row(layer))
    else:
        if mode != "exact" or shards is not None or heads != profile.q_heads or not isinstance(budget, int | float):
            raise ValueError(
                'segment_ids: packed documents have mode="exact", per="query_head", no shards, and a budget as a float'
            )
        table, there = kept_by_length(profile, float(budget), float(spare), grid.length)
        kept = {"table": jnp.asarray(table)[:, profile.row(layer)], "there": there}
        segments = segments_of(segment_ids, query.shape[0], grid.length)

    known = profile.on_device() if isinstance(layer, jax.Array) else profile
    given = Given(query, key, *known.weights(layer), kept, segments)
    given = jax.lax.stop_gradient(jax.tree.map(jnp.asarray, given))
    options: dict[str, Any] = dict(
        block_q=grid.block_q, block_kv=grid.block, q_len=grid.length, kv_len=grid.length, is_causal=True
    )
    if grid.window is not None and grid.window < grid.length:
        options["local_window_size"] = (grid.window - 1, 0)
    options["density_hint"] = _density_bucket(budget, density_hint)
    if not isinstance(given.query, jax.core.Tracer):
        blocks = _blocks(grid, heads, profile.kv_heads, cut)(given)
        return BlockMask.from_blocks(blocks, capacity=capacity, transpose=transpose, **options)

    def mask(cut: Cut, given: Given) -> BlockMask:
        if transpose:
            blocks = _chosen(grid, heads, profile.kv_heads, None, cut, given)
            return BlockMask.from_blocks(blocks, capacity=capacity, **options)
        return BlockMask.of_lists(
            _chosen(grid, heads, profile.kv_heads, capacity or grid.blocks, cut, given), **options
        )

    return over_explicit_axes(mask, cut, heads, given)


def _chosen(grid: CausalGrid, heads: int, kv_heads: int, room: int | None, cut: Cut, given: Given) -> Any:
    """`chosen` for the shard of heads in `given`; `heads` and `kv_heads` count the heads of all shards."""
    here = heads_of_shard(given, kv_heads, cut.heads_axes)
    return chosen(grid, heads // cut.axis_size, here, room=room, cut=cut)


# In one program: operation by operation, the first call compiles hundreds, and XLA cannot partition them as a whole.
@newest_programs
def _blocks(grid: CausalGrid, heads: int, kv_heads: int, cut: Cut) -> Callable[[Given], Any]:
    return partial(over_explicit_axes, partial(_chosen, grid, heads, kv_heads, None), cut, heads)


def _cut(shards: int | None, order: OrderName, mode: Mode) -> Cut:
    if shards is None:
        if order != "contiguous":
            raise ValueError(f"{order=} is an order of shards: give shards, or leave order out")
        return TOGETHER
    Order.of(shards, order)
    if mode == "elastic":
        raise ValueError('mode="elastic" keeps as many blocks as the input asks for: give shards another mode')
    return Cut(int(shards), order)


def _density_bucket(budget: Any, density_hint: float | None) -> float | None:
    if density_hint is None:
        return density_bucket(budget) if isinstance(budget, int | float) else None
    if not 0 < density_hint <= 1:
        raise ValueError(f"{density_hint=} must be above 0 and at most 1")
    return density_bucket(density_hint)


def check_inputs(
    query: Any, key: Any, profile: HadsProfile, layer: Any, heads_axes: tuple[str, ...] = ()
) -> CausalGrid:
    """The grid of a layer's inputs; ValueError if they do not fit the profile. A traced layer is not checked.

    Over `heads_axes` the query heads are sharded, and the KV heads too unless key has all of them.
    """
    check_heads(query, key, profile, layer, heads_axes)
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"HADS chooses for queries and keys of the same tokens; got {query.shape[1]} queries and {key.shape[1]} "
            "keys (for a chunk of a prompt, use hads.select_chunk)"
        )
    return profile.grid(query.shape[1])


def check_heads(query: Any, key: Any, profile: HadsProfile, layer: Any, heads_axes: tuple[str, ...] = ()) -> None:
    """Raise ValueError if the heads are not the profile's, or the model has no such layer."""
    if query.ndim != 4 or key.ndim != 4:
        raise ValueError(f"query and key must be [B, T, heads, D]; got shapes {query.shape} and {key.shape}")
    shards = Cut(heads_axes=heads_axes).axis_size
    kv_heads = key.shape[2] if key.shape[2] == profile.kv_heads else key.shape[2] * shards
    given = query.shape[2] * shards, kv_heads, query.shape[3]
    wanted = profile.q_heads, profile.kv_heads, profile.head_dim
    if given != wanted or key.shape[3] != query.shape[3]:
        raise ValueError(
            f"the profile of {profile.model!r} is for (query heads, KV heads, head_dim)={wanted}; query and key of "
            f"shapes {query.shape} and {key.shape}{f' on each of {shards} shards' if heads_axes else ''} have {given}: "
            "calibrate this model"
        )
    if isinstance(layer, int | np.integer):
        profile.check_layer(layer)


def _kept(profile: HadsProfile, budget: Any, mode: Mode, heads: int, length: int, row: Any) -> dict[str, Any]:
    """The `count` or `threshold` of `choose`, for the layer in this row of the profile."""
    if mode != "exact" and heads != profile.q_heads:
        raise ValueError(f'{mode=} is calibrated for query heads; use mode="exact" with per="kv_head"')
    if isinstance(budget, int | float):
        if mode == "elastic":
            return {"threshold": threshold(profile, budget, length)}
        if mode == "static":
            return {"count": head_counts(profile, budget, length)[row].astype(np.int32)}
        return {"count": int(layer_counts(profile, budget, length, heads=heads)[row])}
    wanted = {"exact": (profile.layers,), "static": (profile.layers, profile.q_heads)}.get(mode)
    if wanted is None:
        raise ValueError("the elastic mode takes its budget as a float")
    if np.shape(budget) != wanted or not jnp.issubdtype(budget.dtype, jnp.integer):
        raise ValueError(f"budget counts must be integers of shape {wanted}; got {budget.dtype}{np.shape(budget)}")
    return {"count": jnp.asarray(budget, jnp.int32)[row]}
