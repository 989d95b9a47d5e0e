"""HADS for a few new tokens: the blocks of the cache that they attend to, chosen from pooled keys alone.

There is one list per KV head, which the query heads of the group and the new tokens share, and one count over all KV
heads of a layer. The estimate is the calibrated one, for a block of one query; of several tokens' masses the root of
the mean square counts, as among the queries of a block. The fifth feature, the query's logits with every key, would
read the whole cache; its second-order form is taken instead, from the keys' means and variances:

    log of the mean exponential of q k / sqrt(D)  ~  q k̄ / sqrt(D) + ½ q² var k / D
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from xsake.hads.profile.causal_grid import CausalGrid, blocks_back
from xsake.hads.profile.estimator import bucket_of
from xsake.hads.profile.rule import Rule
from xsake.hads.selection.chunk import LayerWeights
from xsake.hads.selection.gain import FORCED, gains_of_sorted, key_of
from xsake.hads.selection.pooled import query_parts, spread_weights
from xsake.hads.selection.pooled_keys import PooledKeys
from xsake.hads.selection.program import share_by_group


class StepRule(NamedTuple):
    """The static arguments of a step: a program is compiled for each.

    - `budget`: the share of the cache's blocks that are kept.
    - `room`: slots of the list: `step_count` of the longest sequence to come.
    - `block`, `rule`, `window`: the profile's.
    - `tokens`: the most new tokens at once.
    """

    budget: float
    room: int
    block: int
    rule: Rule
    tokens: int = 1
    window: int | None = None


class StepBlocks(NamedTuple):
    """The blocks that the new tokens of each sequence attend to: entries of all KV heads in one list of W slots."""

    kv_head: Int[Array, "B W"]
    block: Int[Array, "B W"]
    live: Bool[Array, "B W"]


def select_step(
    query: Float[Array, "B T H D"],
    pooled: PooledKeys,
    weights: LayerWeights,
    lengths: Int[Array, "B"],
    step: StepRule,
) -> StepBlocks:
    """The blocks for the last T tokens of each sequence: exactly `step_count` of each, over all KV heads.

    Args:
      query: of the last tokens, rotary positions applied. One to eight tokens are meant: all of them share the blocks.
      pooled: of the cache's keys, the last tokens' own among them (`PooledKeys.write_last`).
      weights: of this layer.
      lengths: tokens of each sequence, the last ones included.
    """
    block, reach = step.block, reach_of(pooled, step)
    grid = CausalGrid(pooled.blocks * block, block, step.rule)
    keys, gain = _sorted_gains(query, pooled, weights, lengths, grid, reach)
    b, groups, n = keys.shape
    # Among equal gains, later heads come first, and in a head the larger keys, as in `keep.row_counts`.
    _, from_end = jax.lax.top_k(gain.reshape(b, groups * n)[:, ::-1], min(step.room, groups * n))
    at = groups * n - 1 - from_end
    chosen = jnp.take_along_axis(keys.reshape(b, -1), at, 1)
    low = (1 << max(n - 1, 1).bit_length()) - 1  # where `key_of` keeps the column
    blocks = jnp.minimum(blocks_inside(lengths, query.shape[1], block, reach), n)
    wanted = jnp.asarray(counts(n, groups, step.budget))[blocks]
    live = (jnp.arange(at.shape[1])[None] < wanted[:, None]) & (chosen >= 0)
    return StepBlocks((at // n).astype(jnp.int32), jnp.where(live, chosen & low, 0), live)


def reach_of(pooled: PooledKeys, step: StepRule) -> int:
    """How many blocks before its own a token sees."""
    return pooled.blocks if step.window is None else blocks_back(step.window, step.block)


def blocks_inside(lengths: Array, tokens: int, block: int, reach: int) -> Array:
    """How many blocks some of a sequence's last tokens see: tokens on both sides of a block's edge one more. In XLA's
    program and in kernels."""
    blocks = lax.div(lengths + (block - 1), jnp.int32(block))
    first = lax.div(jnp.maximum(lengths - tokens, 0), jnp.int32(block))
    return jnp.minimum(blocks, blocks - first + reach)


def step_count(
    blocks: int, kv_heads: int, budget: float, rule: Rule, *, tokens: int = 1, reach: int | None = None
) -> int:
    """How many blocks of a layer's cache a token attends to, over all KV heads.

    With a window the budget is a share of the blocks inside: the tokens' own and `reach` before them.

    ValueError if more blocks are always on: with several new tokens, also the near blocks of the block before the last.

    >>> from xsake.hads.profile.rule import Rule
    >>> step_count(100, 2, 0.1, Rule())
    20
    """
    forced, inside = forced_blocks(blocks, rule, tokens=tokens, reach=reach)
    if budget * inside < forced and budget < 1:
        raise ValueError(
            f"a budget of {budget} for new tokens is below {forced / inside:.4f}, the share of the blocks that are "
            f"always on with {inside} blocks in the cache: allow more, or write densely"
        )
    return int(counts(inside, kv_heads, budget)[inside])


def forced_blocks(blocks: int, rule: Rule, *, tokens: int = 1, reach: int | None = None) -> tuple[int, int]:
    """(how many blocks of a cache of `blocks` are always on for the last tokens, how many these tokens see)."""
    reach = blocks if reach is None else reach
    column, rows = np.arange(blocks), np.arange(max(blocks - min(tokens, 2), 0), blocks)[:, None]
    seen = (column <= rows) & (rows - column <= reach)
    return int((rule.forces(rows, column) & seen).any(0).sum()), min(blocks, reach + min(tokens, 2))


def counts(blocks: int, kv_heads: int, budget: float) -> Int[np.ndarray, "blocks_and_one"]:
    """`budget` of the blocks of all KV heads, rounded, for each number of blocks up to `blocks`."""
    return np.floor(budget * kv_heads * np.arange(blocks + 1) + 0.5).astype(np.int32)


def _sorted_gains(
    query: Float[Array, "B T H D"],
    pooled: PooledKeys,
    weights: LayerWeights,
    lengths: Int[Array, "B"],
    grid: CausalGrid,
    reach: int,
) -> tuple[Int[Array, "B K n"], Float[Array, "B K n"]]:
    """(keys of the blocks of each KV head, sorted upwards; their gains); -1 both where no token sees a block."""
    t = query.shape[1]
    rows = ((lengths - t)[:, None] + jnp.arange(t, dtype=jnp.int32)[None]) // grid.block
    mass = _mass(query, pooled, weights, rows, reach)
    groups, n = pooled.features.shape[1:3]
    shared, omega, phi = share_by_group(mass[:, :, None], weights.sensitivity, weights.burstiness, groups)
    last, column = rows[:, -1][:, None, None], jnp.arange(n, dtype=jnp.int32)[None, None]
    keys = key_of(shared[:, :, 0], last, column, grid)
    # The first tokens may be in an earlier block than the last one, whose near blocks are others.
    back = rows[:, :, None] - column
    seen = (back >= 0) & (back <= reach)
    forced = (grid.rule.forces(rows[:, :, None], column) & seen).any(1)[:, None]
    keys = jnp.where(forced & (keys < FORCED), keys + FORCED, keys)
    in_order = jnp.sort(jnp.where(seen.any(1)[:, None], keys, -1), -1)
    gain = gains_of_sorted(in_order, omega[None, :, None], phi[None, :, None])
    return in_order, jnp.where(in_order < 0, -1.0, gain)


def _mass(
    query: Float[Array, "B T H D"], pooled: PooledKeys, weights: LayerWeights, rows: Int[Array, "B T"], reach: int
) -> Float[Array, "B H n"]:
    """The root of the mean square over the tokens of their estimated masses, a row of which sums to 1."""
    b, t, h, d = query.shape
    groups, n = pooled.features.shape[1], pooled.blocks
    q = query.astype(jnp.float32)
    estimator = weights.estimator
    features = spread_weights(jnp.asarray(estimator.features))[None, None]
    ours = jnp.concatenate(query_parts(q, jnp.zeros_like(q)), -1) * features
    by_group = (b, t, groups, h // groups)
    products = jnp.einsum("btkgd,bkjd->btkgj", ours.reshape(*by_group, -1), pooled.parts(n))
    mean = jnp.einsum("btkgd,bkjd->btkgj", (q * d**-0.5).reshape(*by_group, d), pooled.mean)
    spread = jnp.einsum("btkgd,bkjd->btkgj", (q * q * (0.5 / d)).reshape(*by_group, d), pooled.variance)
    tokens = (mean + spread).reshape(b, t, h, n)
    distance = rows[..., None] - jnp.arange(n, dtype=jnp.int32)[None, None]
    bucket = jnp.asarray(bucket_of(np.arange(n)).astype(np.int32))[jnp.maximum(distance, 0)]
    bias = jnp.moveaxis(jnp.asarray(estimator.distance)[:, bucket], 0, 2)
    bias = bias.at[..., 0].add(jnp.asarray(estimator.sink)[None, None])
    logits = products.reshape(b, t, h, n) + bias + jnp.asarray(estimator.tokens)[None, None, :, None] * tokens
    seen = (distance >= 0) & (distance <= reach)
    mass = jax.nn.softmax(jnp.where(seen[:, :, None], logits, -jnp.inf), -1)
    if t == 1:
        return mass[:, 0]
    root = jnp.sqrt(jnp.square(mass).mean(1))
    return root / root.sum(-1, keepdims=True)
