"""Two runs of a model compared token by token, with logits for a chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int


class Compared(NamedTuple):
    """Of each token: the KL divergence from the first run's prediction to the second's, in nats; what the true next
    token costs each run (0 for the last one, which has none); whether both would say the same."""

    divergence: Float[Array, "B T"]
    loss: Float[Array, "B T"]
    other_loss: Float[Array, "B T"]
    same: Bool[Array, "B T"]


def comparer(model: Any, chunk: int = 512) -> Callable[[Array, Array, Array], Compared]:
    """A compiled function of two runs' final states [B, T, width] and the tokens."""
    from flax import nnx

    graph, weights = nnx.split(model)

    @jax.jit
    def run(weights: Any, states: Array, other: Array, tokens: Int[Array, "B T"]) -> Compared:
        merged = nnx.merge(graph, weights)
        b, t = tokens.shape
        following = jnp.roll(tokens, -1, 1)
        pieces = -(-b * t // chunk)

        def cut(x: Array) -> Array:
            flat = x.reshape(b * t, *x.shape[2:])
            flat = jnp.pad(flat, ((0, pieces * chunk - b * t),) + ((0, 0),) * (flat.ndim - 1))
            return flat.reshape(pieces, chunk, *flat.shape[1:])

        def part(x: tuple[Array, Array, Array]) -> Compared:
            first, second = (jax.nn.log_softmax(merged.logits(s[None])[0]) for s in x[:2])
            divergence = jnp.sum(jnp.exp(first) * (first - second), -1)
            loss, other_loss = (-jnp.take_along_axis(p, x[2][:, None], 1)[:, 0] for p in (first, second))
            return Compared(divergence, loss, other_loss, first.argmax(-1) == second.argmax(-1))

        parts = jax.lax.map(part, (cut(states), cut(other), cut(following)))
        whole = Compared(*(x.reshape(-1)[: b * t].reshape(b, t) for x in parts))
        last = jnp.arange(t) == t - 1
        return whole._replace(loss=jnp.where(last, 0, whole.loss), other_loss=jnp.where(last, 0, whole.other_loss))

    return lambda states, other, tokens: run(weights, states, other, tokens)
