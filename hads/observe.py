"""A model watched while it attends densely: each layer's block statistics and pooled vectors, and how much its output
would feel an error in each head.

A model here is an `xsake.model.Transformer` or anything like it: a Flax NNX module with `hidden(tokens)`,
`logits(states)` and an attribute `attention_fn` that its layers call one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

import xsake
from xsake.hads.block_statistics import BlockStatistics, block_statistics
from xsake.hads.causal_grid import CausalGrid
from xsake.hads.pooled import Pooled, pool


class Observation(NamedTuple):
    """One layer's statistics and pooled vectors on a batch of sequences."""

    statistics: BlockStatistics
    pooled: Pooled


class Touched(NamedTuple):
    """One layer's attention, and the gradient of a sampled log-likelihood with respect to its heads' outputs."""

    query: Float[Array, "B T H D"]
    key: Float[Array, "B T K D"]
    value: Float[Array, "B T K D"]
    gradient: Float[Array, "B T H D"]


def observe(model: Any, tokens: Int[Array, "B T"], block: int) -> list[Observation]:
    """Each layer's observation, under dense attention. A second model of the same shape compiles nothing."""
    from flax import nnx

    graph, weights = nnx.split(model)
    return _observe(graph, weights, tokens, block)


@partial(jax.jit, static_argnames=("graph", "block"))
def _observe(graph: Any, weights: Any, tokens: Array, block: int) -> list[Observation]:
    from flax import nnx

    watched = nnx.merge(graph, weights)
    grid = CausalGrid(tokens.shape[1], block)
    seen: list[Observation] = []

    def attend(query: Array, key: Array, value: Array, **options: Any) -> Array:
        seen.append(Observation(block_statistics(query, key, block=block), pool(query, key, grid)))
        return xsake.attention(query, key, value, **options)

    watched.attention_fn = attend
    watched.hidden(tokens)
    return seen


def touch(model: Any, tokens: Int[Array, "B T"], key: Array, chunk: int = 512) -> list[Touched]:
    """Each layer's attention, and the gradient of a likelihood with respect to its heads' outputs.

    The likelihood is that of tokens drawn from the model itself, each with a random sign: the mean square of its
    gradient in a direction is the curvature of the KL divergence in that direction (the Fisher information), from one
    backward pass. Logits exist `chunk` tokens at a time. `key` draws.
    """
    from flax import nnx

    graph, weights = nnx.split(model)
    return _touch(graph, weights, tokens, key, chunk)


@partial(jax.jit, static_argnames=("graph", "chunk"))
def _touch(graph: Any, weights: Any, tokens: Array, key: Array, chunk: int) -> list[Touched]:
    from flax import nnx

    def likelihood(nudges: list[Array]) -> tuple[Array, list[tuple]]:
        watched = nnx.merge(graph, weights)
        seen: list[tuple] = []

        def attend(query: Array, key: Array, value: Array, **options: Any) -> Array:
            out = xsake.attention(query, key, value, **options)
            seen.append((query, key, value))
            return out + nudges[len(seen) - 1].astype(out.dtype)

        watched.attention_fn = attend
        states = watched.hidden(tokens)
        return _signed_likelihood(watched.logits, states, key, chunk), seen

    config = nnx.merge(graph, weights).config
    zero = jnp.zeros((*tokens.shape, config.q_heads, config.head_dim), jnp.float32)
    gradients, seen = jax.grad(likelihood, has_aux=True)([zero] * config.layers)
    return [Touched(q, k, v, gradient) for (q, k, v), gradient in zip(seen, gradients, strict=True)]


def _signed_likelihood(logits_of: Callable, states: Float[Array, "B T width"], key: Array, chunk: int) -> Array:
    tokens = states.reshape(-1, states.shape[-1])
    count = -(-len(tokens) // chunk)
    real = (jnp.arange(count * chunk) < len(tokens)).astype(jnp.float32).reshape(count, chunk)
    tokens = jnp.pad(tokens, ((0, count * chunk - len(tokens)), (0, 0))).reshape(count, chunk, -1)

    @jax.checkpoint
    def part(x: tuple[Array, Array, Array]) -> Array:
        states, real, key = x
        logits = logits_of(states[None])[0]
        draw, flip = jax.random.split(key)
        drawn = jax.random.categorical(draw, jax.lax.stop_gradient(logits))
        sign = jax.random.rademacher(flip, (chunk,), jnp.float32) * real
        return (sign * jnp.take_along_axis(jax.nn.log_softmax(logits), drawn[:, None], 1)[:, 0]).sum()

    return jax.lax.map(part, (tokens, real, jax.random.split(key, count))).sum()
