"""The features of a pair of blocks: products of pooled vectors, and the mean query against every key.

The mean logit of a pair of blocks is exactly the product of their means. Pooling loses the spread of the logits
inside the pair, on which the block's softmax mass depends; the other features stand for it. With q̄, k̄ the means and var
the variances over a block, for each feature dimension:

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
from jaxtyping import Bool, Float, Int

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.rows import Rows

# The kind of each part of the pooled vectors: the bound is a sum of two products.
KIND_OF_PART = (0, 1, 2, 3, 3)
_ROW_PARTS = 4
_ROWS_PER_PART = 64  # at least: for fewer rows, another launch takes longer than the work it saves
_ROWS = 64  # rows of a chunk at a time: a bound on memory

Tokens = Bool[Array | np.ndarray, "#B n block"] | None  # which tokens of each block exist; None means all


class Pooled(NamedTuple):
    """The two sides of the pooled features and the tokens' feature, float32; weights are not yet applied."""

    query: Float[Array, "B H rows five_D"]
    key: Float[Array, "B K n five_D"]
    tokens: Float[Array, "B H rows n"]


def pool(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    grid: CausalGrid,
    *,
    first: int = 0,
    lengths: Int[Array, "B"] | None = None,
    span: Int[Array, "B 2"] | None = None,
    known: Float[Array, "B K n five_D"] | None = None,
) -> Pooled:
    """Pool a layer's queries and keys in one pass.

    `first`, `lengths` and `span` as in `Rows`: the queries of a chunk, against the keys up to its end, of which `known`
    are the key parts of the features.
    """
    rows = Rows(grid, first, lengths, span=span)
    mean, spread = _moments(blocks_of(query, grid.block_q), rows.queries())
    if known is None:
        known = jnp.concatenate(key_features(blocks_of(key, grid.block), rows.keys()), -1)
    # Exponents are taken about the mean logit, which is cheaper than the largest. No key exceeds it by 80.
    tokens = over_keys(
        mean * query.shape[-1] ** -0.5,
        key[:, : grid.length],
        known[..., : query.shape[-1]],
        grid,
        lambda above: jnp.exp(jnp.minimum(above, 80.0)),
        lambda mean, total: mean + jnp.log(jnp.maximum(total, 1e-30)),
        first=first,
        lengths=lengths,
        span=span,
    )
    return Pooled(jnp.concatenate(query_parts(mean, spread), -1), known, tokens)


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
    query: Float[Array, "B H rows D"],
    key: Float[Array, "B T K D"],
    k_mean: Float[Array, "B K n D"],
    grid: CausalGrid,
    summed: Callable[[Array], Array],
    finish: Callable[[Array, Array], Array],
    *,
    first: int = 0,
    lengths: Int[Array, "B"] | None = None,
    span: Int[Array, "B 2"] | None = None,
) -> Float[Array, "B H rows n"]:
    """For mean queries (scaled) and each block's keys: `finish(mean logit, mean of summed(logit - mean logit))`.

    0 where causality forbids. `first`, `lengths` and `span` as in `Rows`.
    """
    b, h, rows, d = query.shape
    keys = blocks_of(key, grid.block)
    query = query.reshape(b, keys.shape[3], -1, rows, d)
    exists = Rows(grid, first, lengths, span=span).keys()
    sizes = _sizes(exists, grid.block)
    parts = []
    for begin, end in itertools.pairwise(row_bounds(rows) if lengths is None else [*range(0, rows, _ROWS), rows]):
        some, seen = query[:, :, :, begin:end], min((first + end) * grid.tall, grid.columns)
        # 16-bit logits are fine enough for an estimate, and half as much to write and to read.
        logits = jnp.einsum("bkgid,bjskd->bkgijs", some.astype(key.dtype), keys[:, :seen])
        mean = jnp.einsum("bkgid,bkjd->bkgij", some, k_mean[:, :, :seen])
        above = summed(logits.astype(jnp.float32) - mean[..., None])
        if exists is not None:
            above = jnp.where(exists[:, None, None, None, :seen], above, 0)
        part = finish(mean, above.sum(-1) / sizes[:, None, None, None, :seen])
        parts.append(jnp.pad(part, ((0, 0),) * 4 + ((0, grid.columns - seen),)))
    return jnp.where(grid.causal()[first:], jnp.concatenate(parts, 3).reshape(b, h, rows, grid.columns), 0.0)


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


def blocks_of(x: Float[Array, "B T heads D"], block: int) -> Float[Array, "B n block heads D"]:
    b, t, h, d = x.shape
    return jnp.pad(x, ((0, 0), (0, -t % block), (0, 0), (0, 0))).reshape(b, -(-t // block), block, h, d)


def _sizes(exists: Tokens, block: int) -> Float[Array, "#B n"]:
    """How many tokens of each block exist, at least 1."""
    if exists is None:
        return jnp.full((1, 1), block, jnp.float32)
    return jnp.maximum(exists.sum(-1), 1).astype(jnp.float32)


def _moments(x: Float[Array, "B n block heads D"], exists: Tokens) -> tuple[Array, Array]:
    """Mean and variance over a block's tokens, [B, heads, n, D] each; tokens that do not exist do not count."""
    sizes = _sizes(exists, x.shape[2])[:, None, :, None]
    wide = x.astype(jnp.float32)
    if exists is not None:
        wide = jnp.where(exists[..., None, None], wide, 0)
    mean = wide.sum(2).swapaxes(1, 2) / sizes
    return mean, variance(jnp.square(wide).sum(2).swapaxes(1, 2) / sizes, mean)


def key_features(x: Float[Array, "B n block heads D"], exists: Tokens) -> tuple[Float[Array, "B heads n D"], ...]:
    """The keys' side of the features of each block (`key_parts`); 0 for a block without tokens."""
    largest = smallest = x
    if exists is not None:
        there = exists[..., None, None]
        largest, smallest = jnp.where(there, x, -jnp.inf), jnp.where(there, x, jnp.inf)
    extremes = [extreme.swapaxes(1, 2).astype(jnp.float32) for extreme in (largest.max(2), smallest.min(2))]
    if exists is not None:
        some = exists.any(-1)[:, None, :, None]
        extremes = [jnp.where(some, extreme, 0) for extreme in extremes]
    return key_parts(*_moments(x, exists), *extremes)
