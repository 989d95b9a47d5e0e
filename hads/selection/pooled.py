"""The features of a pair of blocks: products of pooled vectors, and the mean query against every key.

The mean logit of a pair of blocks is exactly the product of their means. What pooling loses is the spread of the logits
inside the pair, on which the block's softmax mass depends; the other features stand for it. With q̄, k̄ the means and
var the variances over a block, for each feature dimension:

    mean      q̄ k̄ / sqrt(D)
    keys      ½ (q̄² + var q) var k / D                 second order, from the keys' spread
    queries   ½ var q k̄² / D                           second order, from the queries' spread
    bound     (relu(q̄) max k - relu(-q̄) min k) / sqrt(D)   the largest logit that the block could hold

A head's weights multiply them per rotary frequency (dimensions p and p + D/2 turn together and share one), so all four
are one matrix product of vectors of 5 D numbers.

A single key that stands out in its block shows in none of them. The fifth feature finds it: the mean query's
logits with a block's keys, one by one, as the logarithm of their mean exponential. It costs 1 / (2 block) of dense
attention's arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from xsake.hads.profile.causal_grid import CausalGrid

# The kind of each part of the pooled vectors: the bound is a sum of two products.
KIND_OF_PART = (0, 1, 2, 3, 3)
_ROW_PARTS = 4
_ROWS_PER_PART = 64  # at least: for fewer rows, another launch takes longer than the work it saves


class Pooled(NamedTuple):
    """The two sides of the pooled features and the tokens' feature, float32; weights are not yet applied."""

    query: Float[Array, "B H n five_D"]
    key: Float[Array, "B K n five_D"]
    tokens: Float[Array, "B H n n"]


def pool(query: Float[Array, "B T H D"], key: Float[Array, "B T K D"], grid: CausalGrid) -> Pooled:
    """Pool a layer's queries and keys in one pass."""
    q_mean, q_var = _moments(_blocks(query, grid), grid)
    keys = _blocks(key, grid)
    k_mean, k_var = _moments(keys, grid)
    k_max, k_min = _extremes(keys, grid)
    return Pooled(
        jnp.concatenate(query_parts(q_mean, q_var), -1),
        jnp.concatenate(key_parts(k_mean, k_var, k_max, k_min), -1),
        # Exponents are taken about the mean logit, which is cheaper than the largest. No key exceeds it by 80.
        over_keys(
            q_mean * query.shape[-1] ** -0.5,
            key,
            k_mean,
            grid,
            lambda above: jnp.exp(jnp.minimum(above, 80.0)),
            lambda mean, total: mean + jnp.log(total),
        ),
    )


def query_parts(mean: Array, variance: Array) -> tuple[Array, ...]:
    """The queries' side of the products, one part for each of `KIND_OF_PART`."""
    d = mean.shape[-1]
    root = d**-0.5
    return (
        mean * root,
        (mean * mean + variance) * (0.5 / d),
        variance * (0.5 / d),
        jnp.maximum(mean, 0) * root,
        jnp.minimum(mean, 0) * root,
    )


def key_parts(mean: Array, variance: Array, largest: Array, smallest: Array) -> tuple[Array, ...]:
    """The keys' side of the products."""
    return mean, variance, mean * mean, largest, smallest


def variance(mean_of_squares: Array, mean: Array) -> Array:
    return jnp.maximum(mean_of_squares - mean * mean, 0)


def over_keys(
    query: Float[Array, "B H n D"],
    key: Float[Array, "B T K D"],
    k_mean: Float[Array, "B K n D"],
    grid: CausalGrid,
    summed: Callable[[Array], Array],
    finish: Callable[[Array, Array], Array],
) -> Float[Array, "B H n n"]:
    """Of mean queries (scaled) and each block's keys: `finish(mean logit, mean of summed(logit - mean logit))`.

    0 where causality forbids.
    """
    b, h, n, d = query.shape
    tail = grid.side * grid.block - grid.length
    keys = jnp.pad(key, ((0, 0), (0, tail), (0, 0), (0, 0))).reshape(b, n, grid.block, -1, d)
    query = query.reshape(b, keys.shape[3], -1, n, d)
    sizes = jnp.asarray(grid.sizes, jnp.float32)
    parts = []
    for first, end in itertools.pairwise(row_bounds(n)):
        some = query[:, :, :, first:end]
        # 16-bit logits are fine enough for an estimate, and half as much to write and to read.
        logits = jnp.einsum("bkgid,bjskd->bkgijs", some.astype(key.dtype), keys[:, :end])
        mean = jnp.einsum("bkgid,bkjd->bkgij", some, k_mean[:, :, :end])
        above = summed(logits.astype(jnp.float32) - mean[..., None])
        if tail and end == n:
            above = jnp.where(_inside(grid)[..., 0], above, 0)
        part = finish(mean, above.sum(-1) / sizes[None, None, None, None, :end])
        parts.append(jnp.pad(part, ((0, 0),) * 4 + ((0, n - end),)))
    return jnp.where(grid.causal(), jnp.concatenate(parts, 3).reshape(b, h, n, n), 0.0)


def row_bounds(rows: int) -> list[int]:
    """Bounds of parts of a grid's rows of blocks. The rows of a part see no key of a later part: with four parts, three
    eighths of the work are never done."""
    return np.linspace(0, rows, min(1 + rows // _ROWS_PER_PART, _ROW_PARTS) + 1).round().astype(int).tolist()


def spread_weights(weights: Float[Array, "*lead kinds pairs"]) -> Float[Array, "*lead five_D"]:
    """A weight for each of the 5 D products, from one for each kind of feature and rotary pair."""
    both = jnp.concatenate([weights, weights], -1)  # dimensions p and p + D/2
    parts = [both[..., kind, :] for kind in KIND_OF_PART]
    return jnp.concatenate(parts, -1)


# Heads stay between tokens and dimensions until blocks are reduced: to move them before would copy everything.


def _blocks(x: Float[Array, "B T heads D"], grid: CausalGrid) -> Float[Array, "B n block heads D"]:
    b, _, h, d = x.shape
    x = jnp.pad(x, ((0, 0), (0, grid.side * grid.block - grid.length), (0, 0), (0, 0)))
    return x.reshape(b, grid.side, grid.block, h, d)


def _moments(x: Float[Array, "B n block heads D"], grid: CausalGrid) -> tuple[Array, Array]:
    """Mean and variance over a block's tokens. The padding is 0 and counts only in the number of tokens."""
    tokens = jnp.asarray(grid.sizes, jnp.float32)[None, None, :, None]
    wide = x.astype(jnp.float32)
    mean = wide.sum(2).swapaxes(1, 2) / tokens
    return mean, variance(jnp.square(wide).sum(2).swapaxes(1, 2) / tokens, mean)


def _extremes(x: Float[Array, "B n block heads D"], grid: CausalGrid) -> tuple[Array, Array]:
    """The largest and the smallest of a block's tokens in each dimension."""
    largest = smallest = x
    if grid.length < grid.side * grid.block:
        inside = _inside(grid)[..., None]
        largest, smallest = jnp.where(inside, x, -jnp.inf), jnp.where(inside, x, jnp.inf)
    largest, smallest = largest.max(2), smallest.min(2)
    return largest.swapaxes(1, 2).astype(jnp.float32), smallest.swapaxes(1, 2).astype(jnp.float32)


def _inside(grid: CausalGrid) -> Array:
    """bool[n, block, 1]: the token exists."""
    return (jnp.arange(grid.side * grid.block) < grid.length).reshape(grid.side, grid.block, 1)
