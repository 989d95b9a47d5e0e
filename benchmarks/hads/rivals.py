"""Our block-level versions of published training-free methods, each as the priorities of a layer's blocks.

They are written from the papers' formulas, at HADS's block size, and are not the authors' code: a method that selects
tokens selects blocks here, and its knob is set by the budget. Docstrings say what else differs. More of them, which
come with xsake: `xsake.hads.study.methods.shipped`.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.hads import scores
from benchmarks.hads.ranking import pooled_mass, scaled_count
from xsake.hads.study.methods import ranking
from xsake.hads.study.methods.layer import Layer, Priority


def quest(x: Layer) -> Priority:
    """Quest: the upper bound of a block's logits, a constant number of blocks per row."""
    return _on_diagonal(x, ranking.constant_count(scores.bound_logits(x.query, x.key, x.grid)))


def cobs(x: Layer) -> Priority:
    """COBS: second-order mass, a constant number of blocks per row."""
    return _on_diagonal(x, ranking.constant_count(scores.second_order_logits(x.query, x.key, x.grid)))


def vertical_slash(x: Layer) -> Priority:
    """MInference's vertical-slash: the block columns and block diagonals that the last 64 queries use most, as many
    columns as diagonals, the same number for every head."""
    columns, slashes = scores.last_rows(x.query, x.key, x.grid)
    by_column = ranking.rank_in_row(columns)[..., None, :]
    by_distance = ranking.rank_in_row(slashes)[..., np.maximum(x.grid.distance(), 0)]
    return -jnp.minimum(by_column, by_distance).astype(jnp.float32)


def flex_prefill(x: Layer) -> Priority:
    """FlexPrefill: a head whose pooled estimate agrees with what its last block of queries really attends to (square
    root of the Jensen-Shannon divergence below 0.1) takes the blocks that hold a given share of the pooled map;
    every other head takes the columns and diagonals that hold that share."""
    columns, slashes = scores.last_rows(x.query, x.key, x.grid, queries=x.grid.block)
    pooled = scores.mean_shares(x.query, x.key, x.grid)
    agree = _divergence(pooled[..., -1, :], columns) < 0.1
    b, h, n, _ = x.shape
    whole = (pooled / n).reshape(b, h, n * n)
    by_block = ranking.held_before(whole).reshape(b, h, n, n)
    by_column = ranking.held_before(columns)[..., None, :]
    by_distance = ranking.held_before(slashes)[..., np.maximum(x.grid.distance(), 0)]
    held = jnp.where(agree[..., None, None], by_block, jnp.minimum(by_column, by_distance))
    return x.everywhere(ranking.first_and_diagonal(x.grid)) - held


def sparge(x: Layer) -> Priority:
    """SpargeAttention: a given share of the mean-pooled map in every row. A block whose queries or keys differ too much
    among themselves (mean cosine below 0.1, the default of its public code; its paper searches one per head) has no
    pooled score and comes first, nearer blocks before farther ones."""
    share = ranking.constant_share(scores.mean_shares(x.query, x.key, x.grid))
    group = x.query.shape[2] // x.key.shape[2]
    unlike_query = scores.self_similarity(x.query, x.grid)[..., :, None] < 0.1
    unlike_key = jnp.repeat(scores.self_similarity(x.key, x.grid), group, 1)[..., None, :] < 0.1
    nearness = x.everywhere(2.0 - x.grid.distance() / x.grid.columns)
    return jnp.where(unlike_query | unlike_key, nearness, share)


def prism(x: Layer) -> Priority:
    """Prism: blocks that hold a given share in either band of rotary frequencies; first and diagonal block on."""
    high, low = (ranking.held_before(band) for band in scores.band_shares(x.query, x.key, x.grid))
    return x.everywhere(ranking.first_and_diagonal(x.grid)) - jnp.minimum(high, low)


def blasst(x: Layer) -> Priority:
    """BLASST: blocks whose largest logit comes close to the largest logit so far. BLASST sees every true logit."""
    return scores.running_max_gap(x.query, x.key, x.grid)


def entropy_infer(x: Layer) -> Priority:
    """EntropyInfer's rule on pooled maps: a head gets 1 to 3 times the base number of blocks per row, the more the
    entropy of its rows changes along the sequence."""
    pooled = scores.mean_shares(x.query, x.key, x.grid)
    entropy = -jnp.sum(jnp.where(pooled > 0, pooled * jnp.log(jnp.maximum(pooled, 1e-30)), 0), -1)
    change = jnp.abs(jnp.diff(entropy, axis=-1)) / jnp.maximum(entropy[..., 1:], 1e-6)
    dynamic = entropy.max(-1) >= 1e-5
    heads = jnp.where(dynamic, jnp.clip(1 + 0.5 * (change.mean(-1) - 0.4), 1.0, 3.0), 1.0)
    return _on_diagonal(x, scaled_count(pooled, heads))


def ada_kv(x: Layer) -> Priority:
    """AdaKV's rule on the mean-pooled map: half of the blocks as a constant number per row, then the largest masses of
    all heads together."""
    uniform = jnp.asarray(x.count, jnp.float32) / (x.shape[1] * x.grid.columns)
    pooled = scores.mean_shares(x.query, x.key, x.grid)
    return _on_diagonal(x, pooled_mass(pooled, 0.5 * uniform))


def _on_diagonal(x: Layer, priority: Priority) -> Priority:
    return priority + x.everywhere(ranking.diagonal(x.grid))


def _divergence(p: Array, q: Array) -> Array:
    """Square root of the Jensen-Shannon divergence (base 2)."""
    m = (p + q) / 2

    def kl(a: Array) -> Array:
        return jnp.where(a > 0, a * jnp.log2(jnp.maximum(a, 1e-30) / jnp.maximum(m, 1e-30)), 0).sum(-1)

    return jnp.sqrt(jnp.maximum(kl(p) + kl(q), 0) / 2)


METHODS = (vertical_slash, flex_prefill, sparge, prism, quest, cobs, blasst, entropy_infer, ada_kv)
