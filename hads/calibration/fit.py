"""The estimator's weights, fitted to measured block masses: a convex problem, for all heads of a layer at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.estimator import BUCKETS, KINDS, Estimator, bucket_of
from xsake.hads.selection.estimate import block_logits
from xsake.hads.selection.pooled import KIND_OF_PART, Pooled
from xsake.hads.selection.rows import Rows

STEPS = 300


def fit_estimator(
    pooled: Pooled, mass: Float[Array, "N H rows n"], grid: CausalGrid, *, steps: int = STEPS
) -> tuple[Estimator, float]:
    """A layer's weights, and the divergence that is left (nats per row), from N sequences.

    Minimises the KL divergence from a row of `mass` (`BlockStatistics.share`) to its estimate. The forced blocks of
    a row count as one block: all of them are kept, so their shares of its mass need not be known.
    """
    if grid.rows <= grid.rule.dense_rows:
        raise ValueError(f"{grid.length} tokens are {grid.rows} blocks of {grid.block_q}: all are always on; use more")
    weights, loss = fit_weights(pooled, mass, grid, steps)
    estimator = Estimator(*(np.asarray(x) for x in weights))
    return _extended(estimator, grid), float(loss)


@partial(jax.jit, static_argnames=("grid", "steps"))
def fit_weights(pooled: Pooled, mass: Array, grid: CausalGrid, steps: int) -> tuple[Estimator, Array]:
    """`fit_estimator` as a compiled program; distances that no row has keep a bias of 0."""
    heads, pairs = mass.shape[1], pooled.query.shape[-1] // (2 * len(KIND_OF_PART))
    scale = _typical_size(pooled, heads)
    none = jnp.zeros(heads)
    zero = Estimator(jnp.zeros((heads, len(KINDS), pairs)), none, jnp.zeros((heads, len(BUCKETS))), none)

    def scaled(w: Estimator) -> Estimator:
        return w._replace(features=w.features / scale)

    def divergence(w: Estimator, n: Array) -> Array:
        one = jax.tree.map(lambda x: x[n][None], pooled)
        return _divergence(block_logits(one, scaled(w), Rows(grid))[0], mass[n], grid)

    def objective(w: Estimator, n: Array) -> Array:
        return divergence(w, n) + 1e-4 * jnp.square(w.features).sum()  # features that tell nothing get no weight

    def step(i: Array, carry: tuple) -> tuple:
        gradient = jax.grad(objective)(carry[0], i % len(mass))
        rate = 0.025 * (1 + jnp.cos(jnp.pi * i / steps))
        return _adam(carry, gradient, rate, i + 1)

    w, *_ = jax.lax.fori_loop(0, steps, step, (zero, zero, zero))
    left = jax.lax.map(partial(divergence, w), jnp.arange(len(mass)))
    return scaled(w), left.mean() / heads


def _divergence(logits: Float[Array, "H rows n"], mass: Float[Array, "H rows n"], grid: CausalGrid) -> Array:
    """KL(mass, estimate), a row's forced blocks as one: mean over rows that have other blocks, sum over heads."""
    forced, free = grid.forced(), grid.causal() & ~grid.forced()
    log_mass = jnp.log(jnp.maximum(mass, 1e-9))
    log_estimate = jax.nn.log_softmax(logits, -1)
    in_forced = jnp.where(forced, mass, 0).sum(-1)
    log_forced = jax.nn.logsumexp(jnp.where(forced, log_estimate, -jnp.inf), -1)
    rows = in_forced * (jnp.log(jnp.maximum(in_forced, 1e-9)) - log_forced)
    rows += jnp.where(free, mass * (log_mass - jnp.where(free, log_estimate, 0)), 0).sum(-1)
    return rows[:, grid.rule.dense_rows :].mean(-1).sum()


def _typical_size(pooled: Pooled, heads: int) -> Float[Array, "H kinds pairs"]:
    """How large each feature is, so that one step size suits all."""
    q = jnp.sqrt(jnp.square(pooled.query).mean((0, 2)))
    k = jnp.repeat(jnp.sqrt(jnp.square(pooled.key).mean((0, 2))), heads // pooled.key.shape[1], 0)
    squares = jnp.square(q * k)
    # Sums over the two dimensions of a rotary pair, then over the parts of each kind.
    parts = squares.reshape(heads, len(KIND_OF_PART), 2, -1).sum(2)
    by_kind = [parts[:, np.equal(KIND_OF_PART, kind)].sum(1) for kind in range(len(KINDS))]
    return jnp.sqrt(jnp.stack(by_kind, 1)) + 1e-6


def _adam(carry: tuple, gradient: Any, rate: Array, t: Array) -> tuple:
    w, first, second = carry
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradient)

    def moved(w: Array, m: Array, v: Array) -> Array:
        return w - rate * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)

    return jax.tree.map(moved, w, first, second), first, second


def _extended(estimator: Estimator, grid: CausalGrid) -> Estimator:
    """Give distances that no row has the bias of the farthest distance seen."""
    seen = int(bucket_of(grid.distance()).max())
    distance = np.array(estimator.distance)
    distance[:, seen + 1 :] = distance[:, seen : seen + 1]
    return estimator._replace(distance=distance)
