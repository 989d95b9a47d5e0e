"""A model watched while it attends densely: each layer's block statistics and pooled vectors, and how much its output
would feel an error in each head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from xsake.hads.calibration.block_statistics import BlockStatistics, block_statistics
from xsake.hads.calibration.layerwise import Layers, run_asking, wait_on_device
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.estimator import Estimator
from xsake.hads.selection.estimate import block_mass
from xsake.hads.selection.pooled import Pooled, pool
from xsake.hads.selection.rows import Rows
from xsake.hads.selection.rules import Rules

CHUNK = 512  # tokens whose logits exist at a time


class Observation(NamedTuple):
    """One layer's statistics and pooled vectors on a batch of sequences."""

    statistics: BlockStatistics
    pooled: Pooled

    def mass(self, estimator: Estimator, grid: CausalGrid) -> Float[Array, "B H rows n"]:
        """The masses that HADS chooses by (`estimate.layer_mass`)."""
        estimated = block_mass(self.pooled, estimator, grid)
        return jnp.where(Rows(grid).exact_mask(), self.statistics.share, estimated)


class Touched(NamedTuple):
    """One layer's attention, and the gradient of a sampled log-likelihood with respect to its heads' outputs."""

    query: Float[Array, "B T H D"]
    key: Float[Array, "B T K D"]
    value: Float[Array, "B T K D"]
    gradient: Float[Array, "B T H D"]


def observe(model: Any, tokens: Int[Array, "B T"], grid: CausalGrid) -> list[Observation]:
    """Each layer's observation, under dense attention."""
    layers = Layers(model)
    x, shared = layers.start(tokens, windowed=True)
    seen = []
    for graph, weights in zip(layers.graphs, layers.weights, strict=True):
        x, one = observe_block(graph, layers.cut.attention_fn, weights, x, shared, grid)
        seen.append(one)
    return seen


@partial(jax.jit, static_argnames=("graph", "attention_fn", "grid"), donate_argnames="x")
def observe_block(
    graph: Any, attention_fn: Callable, weights: Any, x: Array, shared: Any, grid: CausalGrid
) -> tuple[Array, Observation]:
    """A block's output, and the observation of its attention."""
    seen = []

    def attend(query: Array, key: Array, value: Array, rules: Rules) -> Array:
        seen.append(observation(rules.scaled(query), key, grid))
        return attention_fn(query, key, value, **rules.arguments())

    return run_asking(graph, weights, x, shared, attend), once(seen)


def observation(query: Float[Array, "B T H D"], key: Float[Array, "B T K D"], grid: CausalGrid) -> Observation:
    return Observation(block_statistics(query, key, **grid.shape, window=grid.window), pool(query, key, grid))


def once[T](seen: list[T]) -> T:
    """What a layer's one call of attention left. ValueError if there were more, or none."""
    if len(seen) != 1:
        raise ValueError(f"a layer must call attention once, not {len(seen)} times")
    return seen[0]


def touch(model: Any, tokens: Int[Array, "B T"], key: Array, chunk: int = CHUNK) -> Iterator[tuple[int, Touched]]:
    """(number, attention and the gradient of a likelihood with respect to its heads' outputs) of each layer, from the
    last to the first. Only one layer is on the device; the states before every layer wait on the host, or on a device
    with much room.

    The likelihood is that of tokens drawn from the model itself, each with a random sign: the mean square of its
    gradient in a direction is the curvature of the KL divergence in that direction (the Fisher information), from one
    backward pass. Logits exist `chunk` tokens at a time. `key` seeds the draws.
    """
    layers = Layers(model)
    x, shared = layers.start(tokens, windowed=True)
    inputs: list[Array | np.ndarray] = []
    stay = wait_on_device(len(layers.weights), x)
    for graph, weights in zip(layers.graphs, layers.weights, strict=True):
        inputs.append(x if stay else np.asarray(x))
        x = forward_block(graph, layers.cut.attention_fn, weights, x, shared)
    gradient = likelihood_gradient(layers.cut.logits, layers.cut.rest, x, key, chunk)
    for number in reversed(range(len(inputs))):
        given = layers.weights[number], jnp.asarray(inputs.pop()), shared, gradient
        gradient, one = touch_block(layers.graphs[number], layers.cut.attention_fn, *given)
        yield number, one


@partial(jax.jit, static_argnames=("graph", "attention_fn"))
def forward_block(graph: Any, attention_fn: Callable, weights: Any, x: Array, shared: Any) -> Array:
    def attend(query: Array, key: Array, value: Array, rules: Rules) -> Array:
        return attention_fn(query, key, value, **rules.arguments())

    return run_asking(graph, weights, x, shared, attend)


@partial(jax.jit, static_argnames=("graph", "attention_fn"))
def touch_block(
    graph: Any, attention_fn: Callable, weights: Any, x: Array, shared: Any, gradient: Array
) -> tuple[Array, Touched]:
    """The gradient with respect to the block's input, and with respect to its heads' outputs."""

    def run(x: Array, nudge: Array | None) -> tuple[Array, tuple]:
        seen = []

        def attend(query: Array, key: Array, value: Array, rules: Rules) -> Array:
            out = attention_fn(query, key, value, **rules.arguments())
            seen.append((out, rules.scaled(query), key, value))
            return out if nudge is None else out + nudge

        return run_asking(graph, weights, x, shared, attend), once(seen)

    out, *_ = jax.eval_shape(lambda x: run(x, None)[1], x)
    _, pull, (_, q, k, v) = jax.vjp(run, x, jnp.zeros(out.shape, out.dtype), has_aux=True)
    before, felt = pull(gradient)
    return before, Touched(q, k, v, felt)


@partial(jax.jit, static_argnames=("logits", "chunk"))
def likelihood_gradient(logits: Callable, rest: Any, x: Array, key: Array, chunk: int) -> Array:
    """The gradient of `signed_likelihood`, with respect to the last layer's output."""
    return jax.grad(lambda x: signed_likelihood(partial(logits, rest), x, key, chunk))(x)


def signed_likelihood(logits_of: Callable, states: Float[Array, "B T width"], key: Array, chunk: int) -> Array:
    """Sum over the tokens of ± log p of a token that the model draws after each."""
    tokens = states.reshape(-1, states.shape[-1])
    count = -(-len(tokens) // chunk)
    real = (jnp.arange(count * chunk) < len(tokens)).astype(jnp.float32).reshape(count, chunk)
    tokens = jnp.pad(tokens, ((0, count * chunk - len(tokens)), (0, 0))).reshape(count, chunk, -1)

    @jax.checkpoint
    def part(x: tuple[Array, Array, Array]) -> Array:
        states, real, key = x
        logits = logits_of(states[None])[0].astype(jnp.float32)
        draw, flip = jax.random.split(key)
        drawn = jax.random.categorical(draw, jax.lax.stop_gradient(logits))
        sign = jax.random.rademacher(flip, (chunk,), jnp.float32) * real
        return (sign * jnp.take_along_axis(jax.nn.log_softmax(logits), drawn[:, None], 1)[:, 0]).sum()

    return jax.lax.map(part, (tokens, real, jax.random.split(key, count))).sum()
