"""Fixed patterns and published training-free methods, each as the priorities of a layer's blocks.

`keep_largest(PRIORITIES[name](layer), grid, count)` is the method's mask with exactly `count` blocks. They are written
from the papers' formulas, at our block size; where a method searches or learns settings offline, ours come from the
HADS profile, and its docstring says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.estimator import bucket_of
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.study import ranking, scores, v1

Blocks = Float[Array, "B H n n"]


@dataclasses.dataclass(frozen=True)
class Layer:
    """What a method may look at: a layer's queries and keys, its number, how many blocks it may keep, a profile.

    Number, count, profile and whether HADS's forced blocks are kept may be traced, so that one compiled program serves
    every layer and budget.
    """

    query: Float[Array, "B T H D"]
    key: Float[Array, "B T K D"]
    grid: CausalGrid
    number: Array | int
    count: Array | int
    profile: HadsProfile
    with_forced: Array | bool = False

    @property
    def forced(self) -> Array:
        return jnp.asarray(self.grid.forced()) & self.with_forced

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.query.shape[0], self.query.shape[2], self.grid.side, self.grid.side

    def everywhere(self, blocks: np.ndarray | Array) -> Blocks:
        """The same for every sequence and head."""
        return jnp.broadcast_to(jnp.asarray(blocks, jnp.float32), self.shape)

    def random(self) -> Float[Array, "1 H n n"]:
        """Uniform numbers that depend on the layer alone."""
        return jax.random.uniform(jax.random.fold_in(jax.random.key(0), self.number), (1, *self.shape[1:]))

    @property
    def head_shares(self) -> Float[Array, "H"]:
        """What calibration gives each head of its free blocks at a middle budget."""
        table = jnp.asarray(self.profile.head_shares)
        return table[len(table) // 2, self.number]

    @property
    def entropy_ratio(self) -> Float[Array, "H"]:
        """What HADS-v1 lets each head keep."""
        return v1.keep_ratio(jnp.asarray(self.profile.entropy))[self.number]


# -- fixed patterns ----------------------------------------------------------------------------------------------------


def sliding_window(x: Layer) -> Blocks:
    """The nearest blocks."""
    return x.everywhere(-x.grid.distance())


def sink_window(x: Layer) -> Blocks:
    """StreamingLLM: the first block and the nearest ones."""
    return x.everywhere(_first(x.grid, 1) - x.grid.distance())


def longformer(x: Layer) -> Blocks:
    """Longformer, causal: two blocks of global tokens (which rows of blocks above see anyway) and the nearest ones."""
    return x.everywhere(_first(x.grid, 2) - x.grid.distance())


def big_bird(x: Layer) -> Blocks:
    """BigBird, causal: the first block, the nearest three, and in every row as many random ones as fit the budget."""
    fixed = x.everywhere(_first(x.grid, 1) + (x.grid.distance() < 3) * 1e6)
    drawn = jnp.where(x.grid.causal() & (fixed[:1] == 0), x.random(), -1.0)
    return fixed + ranking.constant_count(drawn)


def power(x: Layer) -> Blocks:
    """PowerAttention: blocks 1, 2, 4, 8, ... back, then the nearest ones."""
    distance = np.maximum(x.grid.distance(), 0)
    return x.everywhere(((distance & (distance - 1)) == 0) * 1e6 - distance)


def random(x: Layer) -> Blocks:
    """The diagonal and random blocks."""
    return x.everywhere((x.grid.distance() == 0) * 1e6) + x.random()


def duo(x: Layer) -> Blocks:
    """DuoAttention-like: as many dense heads as the budget allows, the others sink and window (first, previous,
    diagonal). The dense ones are those to which calibration gives most blocks; the last one is cut to a window."""
    streaming = _first(x.grid, 1) + (x.grid.distance() <= 1) * 1e6
    place = ranking.rank_in_row(x.head_shares)[:, None, None].astype(jnp.float32)
    return x.everywhere(streaming - x.grid.distance()) - x.grid.side * place


# -- scores at run time ------------------------------------------------------------------------------------------------


def mean_top_k(x: Layer) -> Blocks:
    """Mean-pooled queries and keys, constant number a row, the diagonal on (MoBA; MInference's block-sparse heads)."""
    return _on_diagonal(x, ranking.constant_count(scores.mean_logits(x.query, x.key, x.grid)))


def quest(x: Layer) -> Blocks:
    """Quest's upper bound, constant number a row."""
    return _on_diagonal(x, ranking.constant_count(scores.bound_logits(x.query, x.key, x.grid)))


def cobs(x: Layer) -> Blocks:
    """COBS's second-order mass, constant number a row."""
    return _on_diagonal(x, ranking.constant_count(scores.second_order_logits(x.query, x.key, x.grid)))


def vertical_slash(x: Layer) -> Blocks:
    """MInference's vertical-slash: the block columns and block diagonals that the last 64 queries use most, as many of
    one as of the other, the same number for every head."""
    columns, slashes = scores.last_rows(x.query, x.key, x.grid)
    by_column = ranking.rank_in_row(columns)[..., None, :]
    by_distance = ranking.rank_in_row(slashes)[..., np.maximum(x.grid.distance(), 0)]
    return -jnp.minimum(by_column, by_distance).astype(jnp.float32)


def flex_prefill(x: Layer) -> Blocks:
    """FlexPrefill: a head whose pooled estimate agrees with what its last block of queries really attends to (square
    root of the Jensen-Shannon divergence below 0.1) takes the blocks that hold a given share of the pooled map; the
    others take vertical and slash lines that hold that share."""
    columns, slashes = scores.last_rows(x.query, x.key, x.grid, queries=x.grid.block)
    pooled = ranking.softmax(scores.mean_logits(x.query, x.key, x.grid))
    agree = _divergence(pooled[..., -1, :], columns) < 0.1
    b, h, n, _ = x.shape
    whole = (pooled / n).reshape(b, h, n * n)
    by_block = ranking.held_before(whole).reshape(b, h, n, n)
    by_column = ranking.held_before(columns)[..., None, :]
    by_distance = ranking.held_before(slashes)[..., np.maximum(x.grid.distance(), 0)]
    held = jnp.where(agree[..., None, None], by_block, jnp.minimum(by_column, by_distance))
    return x.everywhere(_ends(x.grid)) - held


def x_attention_8(x: Layer) -> Blocks:
    """XAttention with stride 8: antidiagonal sums, a given share in every row; first and diagonal block on."""
    return x.everywhere(_ends(x.grid)) + ranking.constant_share(scores.antidiagonal_shares(x.query, x.key, x.grid, 8))


def x_attention_16(x: Layer) -> Blocks:
    """XAttention with stride 16."""
    return x.everywhere(_ends(x.grid)) + ranking.constant_share(scores.antidiagonal_shares(x.query, x.key, x.grid, 16))


def sparge(x: Layer) -> Blocks:
    """SpargeAttention: a given share of the mean-pooled map in every row; blocks of queries or keys that are unlike
    themselves (mean cosine below 0.6) have no pooled score and come first, the nearest of them before the others."""
    share = ranking.constant_share(ranking.softmax(scores.mean_logits(x.query, x.key, x.grid)))
    group = x.query.shape[2] // x.key.shape[2]
    unlike_query = scores.self_similarity(x.query, x.grid)[..., :, None] < 0.6
    unlike_key = jnp.repeat(scores.self_similarity(x.key, x.grid), group, 1)[..., None, :] < 0.6
    nearness = x.everywhere(2.0 - x.grid.distance() / x.grid.side)
    return jnp.where(unlike_query | unlike_key, nearness, share)


def prism(x: Layer) -> Blocks:
    """Prism: blocks that hold a given share in either band of rotary frequencies; first and diagonal block on."""
    high, low = (ranking.held_before(band) for band in scores.band_shares(x.query, x.key, x.grid))
    return x.everywhere(_ends(x.grid)) - jnp.minimum(high, low)


def flash_prefill(x: Layer) -> Blocks:
    """FlashPrefill: blocks whose score comes within a factor of the row's highest; first and diagonal block on."""
    return x.everywhere(_ends(x.grid)) + ranking.near_peak(scores.strided_peaks(x.query, x.key, x.grid))


def blasst(x: Layer) -> Blocks:
    """BLASST: blocks whose largest logit comes within a distance of the largest so far. It sees every true logit."""
    return scores.running_max_gap(x.query, x.key, x.grid)


def entropy_infer(x: Layer) -> Blocks:
    """EntropyInfer's rule on pooled maps: a head gets 1 to 3 times the base number of blocks a row, growing with how
    much the entropy of its rows changes along the sequence."""
    pooled = ranking.softmax(scores.mean_logits(x.query, x.key, x.grid))
    entropy = -jnp.sum(jnp.where(pooled > 0, pooled * jnp.log(jnp.maximum(pooled, 1e-30)), 0), -1)
    change = jnp.abs(jnp.diff(entropy, axis=-1)) / jnp.maximum(entropy[..., 1:], 1e-6)
    dynamic = entropy.max(-1) >= 1e-5
    heads = jnp.where(dynamic, jnp.clip(1 + 0.5 * (change.mean(-1) - 0.4), 1.0, 3.0), 1.0)
    return _on_diagonal(x, ranking.scaled_count(pooled, heads))


def ada_kv(x: Layer) -> Blocks:
    """AdaKV's rule on the mean-pooled map: masses of all heads compete, after half of a constant number a row."""
    uniform = jnp.asarray(x.count, jnp.float32) / (x.shape[1] * x.grid.side)
    pooled = ranking.softmax(scores.mean_logits(x.query, x.key, x.grid))
    return _on_diagonal(x, ranking.pooled_mass(pooled, 0.5 * uniform))


def tca(x: Layer) -> Blocks:
    """TCA-like: each head's constant number a row in the proportions that calibration found, by mean-pooled score."""
    heads = jnp.maximum(x.head_shares, 0.01)
    return _on_diagonal(x, ranking.scaled_count(scores.mean_logits(x.query, x.key, x.grid), heads))


# -- the seed's method -------------------------------------------------------------------------------------------------


def hads_v1(x: Layer) -> Blocks:
    """HADS-v1: each head's constant number a row from its entropy (`hads.study.v1`), by mean mass at their distance."""
    mass = jnp.asarray(x.profile.distance_mass)[x.number][:, bucket_of(x.grid.distance())]
    mass = jnp.where(x.grid.causal(), x.everywhere(mass), -1.0)
    return x.everywhere(_ends(x.grid)) + ranking.scaled_count(mass, x.entropy_ratio)


def hads_v1_random(x: Layer) -> Blocks:
    """HADS-v1 with random blocks: the seed's own choice."""
    drawn = jnp.where(x.grid.causal(), jnp.broadcast_to(x.random(), x.shape), -1.0)
    return x.everywhere(_ends(x.grid)) + ranking.scaled_count(drawn, x.entropy_ratio)


PRIORITIES: dict[str, Callable[[Layer], Blocks]] = {
    method.__name__: method
    for method in (
        sliding_window,
        sink_window,
        longformer,
        big_bird,
        power,
        random,
        duo,
        mean_top_k,
        vertical_slash,
        flex_prefill,
        x_attention_8,
        x_attention_16,
        sparge,
        prism,
        flash_prefill,
        quest,
        cobs,
        blasst,
        entropy_infer,
        ada_kv,
        tca,
        hads_v1,
        hads_v1_random,
    )
}


def _first(grid: CausalGrid, columns: int) -> np.ndarray:
    return np.broadcast_to((np.arange(grid.side) < columns) * 1e6, (grid.side, grid.side))


def _ends(grid: CausalGrid) -> np.ndarray:
    """The first block and the diagonal one."""
    return _first(grid, 1) + (grid.distance() == 0) * 1e6


def _on_diagonal(x: Layer, priority: Blocks) -> Blocks:
    return priority + x.everywhere((x.grid.distance() == 0) * 1e6)


def _divergence(p: Array, q: Array) -> Array:
    """Square root of the Jensen-Shannon divergence (base 2)."""
    m = (p + q) / 2

    def kl(a: Array) -> Array:
        return jnp.where(a > 0, a * jnp.log2(jnp.maximum(a, 1e-30) / jnp.maximum(m, 1e-30)), 0).sum(-1)

    return jnp.sqrt(jnp.maximum(kl(p) + kl(q), 0) / 2)
