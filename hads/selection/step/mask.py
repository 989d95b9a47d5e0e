"""`step.select_step` as a mask, whose lists GPU kernels write where they serve the shapes."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.mask.grid import Grid
from xsake.hads.mask.lists.rows import finished
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection import program
from xsake.hads.selection.chunk import LayerWeights
from xsake.hads.selection.pooled_keys import PooledKeys
from xsake.hads.selection.step.blocks import StepRule, counts, reach_of, select_step

_BLOCK_Q = 64  # more than all new tokens: the mask has one row, whose blocks are all partial
_MOST_BLOCKS = 32768  # of all KV heads, both numbers rounded up to powers of two: a program holds their gains


class _Given(NamedTuple):
    query: Float[Array, "B T H D"]
    pooled: PooledKeys
    weights: LayerWeights
    lengths: Int[Array, "B"]


def step_mask(
    query: Float[Array, "B T H D"],
    pooled: PooledKeys,
    weights: LayerWeights,
    lengths: Int[Array, "B"],
    step: StepRule,
    *,
    slots: int,
) -> BlockMask:
    """The blocks that `select_step` chooses, as a mask of one row for each KV head, for a cache of `slots` tokens.

    The mask has no rule: a call with it must say, by positions, which tokens a query sees.
    """
    if -(-slots // step.block) != pooled.blocks:
        raise ValueError(
            f"a cache of {slots} tokens has not the {pooled.blocks} blocks of {step.block} that are pooled"
        )
    given = _Given(query, pooled, weights, lengths)
    kernels, xla = (partial(by, step) for by in (_by_kernels, _by_xla))
    columns, row_ptr = program.by_kernels_or_xla(kernels, xla, unsupported(step.block, pooled), given)
    b, kv_heads, _ = columns.shape
    none = np.zeros((b, kv_heads, 1), np.int32)
    grid = Grid.of(_BLOCK_Q, step.block, query.shape[1], slots, False, None)
    return BlockMask(
        kv_indices=columns,
        kv_row_ptr=row_ptr,
        kv_num_full=none,
        row_order=none,
        q_indices=None,
        q_row_ptr=None,
        q_num_full=None,
        col_order=None,
        **dataclasses.asdict(grid),
        density_hint=None,
        complete=True,  # no head keeps more than `room` blocks, or more than there are
    )


def unsupported(block: int, pooled: PooledKeys) -> str | None:
    """Why there are no kernels for these shapes; None if there are."""
    _, kv_heads, n, _, head_dim = pooled.features.shape
    together = (1 << (kv_heads - 1).bit_length()) * (1 << (n - 1).bit_length())
    if together > _MOST_BLOCKS:
        return f"{n} blocks of {kv_heads} KV heads are {together} as powers of two, and must be at most {_MOST_BLOCKS}"
    return program.unsupported(head_dim, CausalGrid(n * block, block))


def _by_kernels(step: StepRule, given: _Given) -> tuple[Array, Array]:
    """(i32[B, K, capacity], the columns of each head's blocks, as `lists.rows.finished` leaves them; row_ptr)."""
    from xsake.hads.selection.gpu import step as gpu_step

    query, pooled, weights, lengths = given
    groups, n = pooled.features.shape[1:3]
    reach = reach_of(pooled, step)
    grid = CausalGrid(n * step.block, step.block, step.rule)
    where: dict[str, Any] = dict(block=step.block, reach=reach)
    logits = gpu_step.logits(query, pooled.features, weights.estimator, lengths, **where)
    gains = gpu_step.gains(logits, weights.sensitivity, weights.burstiness, lengths, grid=grid, reach=reach)
    return gpu_step.lists(
        gains, counts(n, groups, step.budget), lengths, **where, tokens=query.shape[1], room=step.room
    )


def _by_xla(step: StepRule, given: _Given) -> tuple[Array, Array]:
    chosen = select_step(*given, step)
    b = len(chosen.block)
    kv_heads, n = given.pooled.features.shape[1:3]
    listed = jnp.zeros((b, kv_heads, n), bool).at[jnp.arange(b)[:, None], chosen.kv_head, chosen.block].max(chosen.live)
    columns = jnp.sort(jnp.where(listed, jnp.arange(n, dtype=jnp.int32), n), -1)[..., : min(step.room, n)]
    number = listed.sum(-1, dtype=jnp.int32)[..., None]
    row_ptr = jnp.concatenate([jnp.zeros_like(number), number], -1)
    return finished(jnp, columns, row_ptr, number)[0], row_ptr
