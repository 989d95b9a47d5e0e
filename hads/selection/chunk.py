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
from jaxtyping import Float, Int

from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.mask.grid import Grid
from xsake.hads.mask.lists.compact import compact
from xsake.hads.mask.lists.rows import finished
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.estimator import Estimator
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.profile.rule import Rule
from xsake.hads.selection.choice import choose
from xsake.hads.selection.estimate import layer_mass
from xsake.hads.selection.pooled_keys import PooledKeys
from xsake.hads.selection.program import by_kernels_or_xla, unsupported
from xsake.hads.selection.rows import Rows


class LayerWeights(NamedTuple):
    """One layer of a profile as arrays, so that one compiled program serves all layers."""

    estimator: Estimator
    sensitivity: Any
    burstiness: Any

    @classmethod
    def of(cls, profile: HadsProfile, layer: int) -> LayerWeights:
        """One layer's weights from a profile."""
        profile.check_layer(layer)
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), cls(*profile.weights(layer)))


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
    block_q: int = 0,
    rule: Rule,
    density_hint: float | None = None,
    window: int | None = None,
    answers: Int[Array | np.ndarray, "B A"] | None = None,
) -> BlockMask:
    """The mask of one layer for the queries of a chunk, which are tokens `start` to `start + T` of their sequences.

    Works under jit. The mask has T queries and S keys. Its rule is causality counted from `start`, which is the window
    `(None, start)`: pass the mask to `xsake.attention` with the same keys, without `is_causal`.

    Args:
      query: the chunk's queries, rotary positions applied.
      key: the keys of the sequences. The first start + T are read: a cache of any size, which need not be cut.
      pooled: the same keys pooled, the chunk's own among them (`PooledKeys.write`).
      weights: this layer's (`LayerWeights.of`).
      counts: how many blocks each sequence keeps in this chunk, over all heads: a row of `hads.chunk_counts`.
      lengths: tokens of each sequence.
      start: a multiple of `block_q`.
      block, block_q, rule: the profile's; rows are as high as blocks are wide unless `block_q` says otherwise.
      density_hint: the budget, by which attention looks up its tuned configuration.
      window: the profile's. If it is within the start + T keys, the mask has no rule: it says which blocks are read,
        and the call must say which tokens see each other, by `positions`, `is_causal` and `local_window_size`.
      answers: where a conversation's earlier answers begin, 0 in slots that are left: the rows before them, where their
        questions stand, are chosen as the last rows are.
    """
    length = query.shape[1]
    if key.shape[1] < start + length:
        raise ValueError(f"{length} queries from token {start} on need {start + length} keys; got {key.shape[1]}")
    grid = CausalGrid(start + length, block, rule, window, block_q)
    if start % grid.block_q:
        raise ValueError(f"{start=} must be a multiple of the profile's rows of {grid.block_q} tokens")
    if pooled.blocks < grid.columns:
        raise ValueError(f"{grid.columns} blocks of keys are there, but only {pooled.blocks} pooled ones")
    windowed = window is not None and window < grid.length
    mask = Grid.of(
        block_q=grid.block_q,
        block_kv=block,
        q_len=length,
        kv_len=key.shape[1],
        is_causal=start == 0 and not windowed,
        window=None if start == 0 or windowed else (None, start),
    )
    begin = None if answers is None else jnp.asarray(answers, jnp.int32)
    given = _Given(query, key, pooled, weights, jnp.asarray(counts, jnp.int32), jnp.asarray(lengths, jnp.int32), begin)
    kernels, xla = (partial(by, grid, mask, start // grid.block_q) for by in (_by_kernels, _by_xla))
    lists = by_kernels_or_xla(kernels, xla, unsupported(query.shape[-1], grid), jax.lax.stop_gradient(given))
    return BlockMask.of_finished(lists, **dataclasses.asdict(mask), density_hint=density_hint)


class _Given(NamedTuple):
    """The arguments of `select_chunk` that are arrays."""

    query: Float[Array, "B T H D"]
    key: Float[Array, "B S K D"]
    pooled: PooledKeys
    weights: LayerWeights
    counts: Int[Array, "B"]
    lengths: Int[Array, "B"]
    answers: Int[Array, "B A"] | None = None


def _by_kernels(grid: CausalGrid, mask: Grid, first: int, given: _Given) -> tuple[Array, ...]:
    """The finished lists of the mask's rows, which are the rows of `grid` from row `first` on."""
    from xsake.hads.selection.gpu import choose as gpu_choose
    from xsake.hads.selection.gpu import estimate
    from xsake.hads.selection.gpu.exact import with_exact_rows as with_exact_logits

    rows, weights = Rows(grid, first, given.lengths, given.answers), given.weights
    logits = estimate.block_logits(given.query, given.key, weights.estimator, rows, given.pooled.features)
    logits = with_exact_logits(logits, given.query, given.key, rows)
    rule = {"sensitivity": weights.sensitivity, "burstiness": weights.burstiness}
    choice = gpu_choose.choose(logits, rows, count=given.counts[:, None], **rule)
    return choice.finished_lists(rows, mask.num_allowed)


def _by_xla(grid: CausalGrid, mask: Grid, first: int, given: _Given) -> tuple[Array, ...]:
    rows, known = Rows(grid, first, given.lengths, given.answers), given.pooled.parts(grid.columns)
    mass = layer_mass(given.query, given.key, given.weights.estimator, rows, known)
    rule = {"sensitivity": given.weights.sensitivity, "burstiness": given.weights.burstiness}
    blocks = choose(mass, rows, count=given.counts[:, None], **rule)
    full = mask.allowed_and_full()[1][:, : grid.columns]
    return finished(jnp, *compact(blocks, full, mask.num_allowed + 1))
