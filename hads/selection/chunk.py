"""HADS for a chunk of a prompt: the blocks of its rows, chosen from all keys up to the chunk's end.

The rows of the chunk compete for the chunk's count, as all rows do in `select`; a chunk that is the whole prompt gets
the blocks that `select` gives. Sequences of a batch may have different lengths: rows past a sequence's end get nothing.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from xsake._ground.device import on_gpu
from xsake._ground.trace import jit_may_partition
from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.mask.grid import Grid
from xsake.hads.mask.lists.compact import compact
from xsake.hads.mask.lists.rows import finished
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.estimator import Estimator, bucket_of
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.profile.rule import Rule
from xsake.hads.selection.gain import gains_of_sorted, key_of
from xsake.hads.selection.keep import nonnegative_order, row_counts
from xsake.hads.selection.pooled import query_parts, spread_weights, variance
from xsake.hads.selection.pooled_keys import PooledKeys
from xsake.hads.selection.program import unsupported

_ROWS = 64  # at a time, of mean queries against every key: a bound on memory


class LayerWeights(NamedTuple):
    """What a profile knows of one layer, as arrays: one compiled program serves all layers."""

    estimator: Estimator
    sensitivity: Any
    burstiness: Any

    @classmethod
    def of(cls, profile: HadsProfile, layer: int) -> LayerWeights:
        """One layer's weights from a profile."""
        if not 0 <= layer < profile.layers:
            raise ValueError(f"{layer=} must be an int from 0 to {profile.layers - 1}, the profile's layers")
        weights = cls(profile.estimator(layer), profile.sensitivity[layer], profile.burstiness[layer])
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), weights)


def select_chunk(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    pooled: PooledKeys,
    weights: LayerWeights,
    counts: Int[Array | np.ndarray, "B"],
    lengths: Int[Array | np.ndarray, "B"],
    *,
    start: int,
    block: int,
    rule: Rule,
    density_hint: float | None = None,
    window: int | None = None,
) -> BlockMask:
    """The mask of one layer for the queries of a chunk, which are tokens `start` to `start + T` of their sequences.

    Works under jit. The mask has T queries and S keys. Its rule is causality counted from `start`, which is the window
    `(None, start)`: pass the mask to `xsake.attention` with the same keys, without `is_causal`.

    Args:
      query: the chunk's queries, rotary positions applied.
      key: the keys of the sequences. The first start + T are read: a cache of any size, which need not be cut.
      pooled: of the same keys, the chunk's own among them (`PooledKeys.write`).
      weights: of this layer (`LayerWeights.of`).
      counts: how many blocks each sequence keeps in this chunk, over all heads: a row of `hads.chunk_counts`.
      lengths: tokens of each sequence.
      start: a multiple of the block.
      block, rule: those of the profile.
      density_hint: the budget, by which attention looks up its tuned configuration.
      window: of the profile. If it is within the start + T keys, the mask has no rule: it says which blocks are read,
        and the call must say which tokens see each other, by `positions`, `is_causal` and `local_window_size`.
    """
    length = query.shape[1]
    if start % block:
        raise ValueError(f"{start=} must be a multiple of the profile's block of {block} tokens")
    if key.shape[1] < start + length:
        raise ValueError(f"{length} queries from token {start} on need {start + length} keys; got {key.shape[1]}")
    grid = CausalGrid(start + length, block, rule, window)
    if pooled.blocks < grid.side:
        raise ValueError(f"{grid.side} blocks of keys are there, but only {pooled.blocks} pooled ones")
    windowed = window is not None and window < grid.length
    mask = Grid.of(
        block_q=block,
        block_kv=block,
        q_len=length,
        kv_len=key.shape[1],
        is_causal=start == 0 and not windowed,
        window=None if start == 0 or windowed else (None, start),
    )
    given = _Given(query, key, pooled, weights, jnp.asarray(counts, jnp.int32), jnp.asarray(lengths, jnp.int32))
    lists = _chosen(grid, mask, start // block, jax.lax.stop_gradient(given))
    return BlockMask.of_finished(lists, **dataclasses.asdict(mask), density_hint=density_hint)


class _Given(NamedTuple):
    """What the blocks of a chunk are chosen from: arguments of `select_chunk`."""

    query: Float[Array, "B T H D"]
    key: Float[Array, "B S K D"]
    pooled: PooledKeys
    weights: LayerWeights
    counts: Int[Array, "B"]
    lengths: Int[Array, "B"]


def _chosen(grid: CausalGrid, mask: Grid, first: int, given: _Given) -> tuple[Array, ...]:
    """The finished lists of the mask's rows, which are the rows of `grid` from row `first` on."""
    xla = partial(_by_xla, grid, mask, first)
    # Kernels are not partitioned over devices.
    if unsupported(given.query.shape[-1], grid) is not None or jit_may_partition():
        return xla(given)
    return on_gpu(partial(_by_kernels, grid, mask, first), xla, given)


def _by_kernels(grid: CausalGrid, mask: Grid, first: int, given: _Given) -> tuple[Array, ...]:
    from xsake.hads.selection.gpu import choose as gpu_choose
    from xsake.hads.selection.gpu import estimate
    from xsake.hads.selection.gpu.rows import Rows

    rows, weights = Rows(grid, first, given.lengths), given.weights
    logits = estimate.block_logits(given.query, given.key, weights.estimator, rows, given.pooled.features)
    rule = {"sensitivity": weights.sensitivity, "burstiness": weights.burstiness}
    choice = gpu_choose.choose(logits, rows, count=given.counts[:, None], **rule)
    return choice.finished_lists(grid, mask.num_allowed)


def _by_xla(grid: CausalGrid, mask: Grid, first: int, given: _Given) -> tuple[Array, ...]:
    logits = _logits(grid, first, given)
    mass = jax.nn.softmax(jnp.where(grid.causal()[None, None, first:], logits, -jnp.inf), -1)
    blocks = keep_by_gain(mass, given.weights, given.counts, given.lengths, first, grid)
    full = mask.allowed_and_full()[1][:, : grid.side]
    return finished(jnp, *compact(blocks, full, mask.num_allowed + 1))


def keep_by_gain(
    mass: Float[Array, "B H rows n"],
    weights: LayerWeights,
    counts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    first: int,
    grid: CausalGrid,
) -> Bool[Array, "B H rows n"]:
    """`choose` for rows of blocks from row `first` on, on any masses; rows past a sequence's end keep nothing."""
    b, h, rows, n = mass.shape
    row, column = first + jnp.arange(rows, dtype=jnp.int32), jnp.arange(n, dtype=jnp.int32)
    sides = (lengths + grid.block - 1) // grid.block
    back = row[:, None] - column[None]
    exists = (row[None] < sides[:, None])[:, None, :, None] & ((back >= 0) & (back <= grid.reach))[None, None]
    keys = key_of(mass, row[None, None, :, None], column[None, None, None], grid)
    keys = jnp.where(exists, keys, -1)
    in_order = jnp.sort(keys, -1)
    weight = grid.rule.row_weight(row[None], sides[:, None]).astype(jnp.float32)[:, None, :, None]
    omega, phi = (jnp.asarray(x)[None, :, None, None] for x in (weights.sensitivity, weights.burstiness))
    gain = jnp.where(in_order < 0, -1.0, gains_of_sorted(in_order, omega * weight, phi))
    kept = row_counts(nonnegative_order(gain).reshape(b, h * rows, n), counts).reshape(b, h, rows)
    last = jnp.take_along_axis(in_order, n - jnp.maximum(kept, 1)[..., None], -1)
    return (keys >= last) & (kept > 0)[..., None]


def _logits(grid: CausalGrid, first: int, given: _Given) -> Float[Array, "B H rows n"]:
    """`estimate.block_logits` for the rows of a chunk; above the diagonal it is anything."""
    b, _, h, d = given.query.shape
    estimator = given.weights.estimator
    mean, spread = _query_moments(given.query, given.lengths, first, grid)
    rows, n, groups = mean.shape[2], grid.side, given.key.shape[2]
    ours = (
        jnp.concatenate(query_parts(mean, spread), -1) * spread_weights(jnp.asarray(estimator.features))[None, :, None]
    )
    products = jnp.einsum("bkgid,bkjd->bkgij", ours.reshape(b, groups, h // groups, rows, -1), given.pooled.parts(n))
    bias = jnp.asarray(estimator.distance)[:, bucket_of(grid.distance()[first:])]
    bias = bias.at[:, :, 0].add(jnp.asarray(estimator.sink)[:, None])
    tokens = jnp.asarray(estimator.tokens)[None, :, None, None] * _over_keys(grid, first, given, mean * d**-0.5)
    return products.reshape(b, h, rows, n) + bias[None] + tokens


def _query_moments(query: Array, lengths: Array, first: int, grid: CausalGrid) -> tuple[Array, Array]:
    """Mean and variance of each block's queries, [B, H, rows, D]; queries past a sequence's end do not count."""
    b, t, h, d = query.shape
    rows = grid.side - first
    x = jnp.pad(query, ((0, 0), (0, rows * grid.block - t), (0, 0), (0, 0)))
    x = x.reshape(b, rows, grid.block, h, d).astype(jnp.float32)
    place = (first * grid.block + jnp.arange(rows * grid.block, dtype=jnp.int32)).reshape(1, rows, grid.block)
    here = place < jnp.minimum(lengths, grid.length)[:, None, None]
    count = jnp.maximum(here.sum(2), 1).astype(jnp.float32)[:, None, :, None]
    x = jnp.where(here[..., None, None], x, 0)
    mean = x.sum(2).swapaxes(1, 2) / count
    return mean, variance(jnp.square(x).sum(2).swapaxes(1, 2) / count, mean)


def _over_keys(
    grid: CausalGrid, first: int, given: _Given, query: Float[Array, "B H rows D"]
) -> Float[Array, "B H rows n"]:
    """The tokens' feature (`pooled`): the log of the mean exponential of mean queries' logits with a block's keys.

    0 for keys that come after the last of the rows that are computed together.
    """
    b, h, rows, d = query.shape
    key, lengths = given.key, given.lengths
    n, groups = grid.side, key.shape[2]
    keys = jnp.pad(key[:, : grid.length], ((0, 0), (0, n * grid.block - grid.length), (0, 0), (0, 0)))
    keys = keys.reshape(b, n, grid.block, groups, d)
    place = jnp.arange(n * grid.block, dtype=jnp.int32).reshape(1, n, grid.block)
    here = place < jnp.minimum(lengths, grid.length)[:, None, None]
    count = jnp.maximum(here.sum(2), 1).astype(jnp.float32)[:, None, None, None]
    parts = []
    for begin in range(0, rows, _ROWS):
        some = query[:, :, begin : begin + _ROWS].reshape(b, groups, h // groups, -1, d)
        seen = first + begin + some.shape[3]
        logits = jnp.einsum("bkgid,bjskd->bkgijs", some.astype(key.dtype), keys[:, :seen])
        mean = jnp.einsum("bkgid,bkjd->bkgij", some, given.pooled.mean[:, :, :seen])
        # Exponents are taken about the mean logit, which is cheaper than the largest. No key exceeds it by 80.
        above = jnp.exp(jnp.minimum(logits.astype(jnp.float32) - mean[..., None], 80.0))
        total = jnp.where(here[:, None, None, None, :seen], above, 0).sum(-1) / count[..., :seen]
        part = mean + jnp.log(jnp.maximum(total, 1e-30))
        parts.append(jnp.pad(part, ((0, 0),) * 4 + ((0, n - seen),)))
    return jnp.concatenate(parts, 3).reshape(b, h, rows, n)
