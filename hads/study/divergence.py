"""Two runs of a model compared token by token, with logits for a chunk of tokens at a time."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int


class Compared(NamedTuple):
    """Two runs' predictions after each token.

    divergence: KL from the first run's prediction to the other's, in nats.
    loss, other_loss: cross-entropy of the true next token; 0 for the last token, which has none.
    right, other_right: whether the likeliest next token is the true one; False for the last token.
    same: whether the runs' likeliest tokens agree.
    """

    divergence: Float[Array, "B T"]
    loss: Float[Array, "B T"]
    other_loss: Float[Array, "B T"]
    right: Bool[Array, "B T"]
    other_right: Bool[Array, "B T"]
    same: Bool[Array, "B T"]


def compare(
    model: Any,
    states: Float[Array, "B T width"],
    other: Float[Array, "B T width"],
    tokens: Int[Array, "B T"],
    chunk: int | None = None,
) -> Compared:
    """Compare two runs' final states over the same tokens, `chunk` tokens at a time (by default `usual_chunk`)."""
    from flax import nnx

    graph, weights = nnx.split(model)
    return compare_states(graph, weights, states, other, tokens, chunk or usual_chunk())


def usual_chunk() -> int:
    """Tokens whose logits exist at a time: few on a CPU for its caches, many on an accelerator for few launches."""
    return 512 if jax.default_backend() == "cpu" else 4096


@partial(jax.jit, static_argnames=("graph", "chunk"))
def compare_states(graph: Any, weights: Any, states: Array, other: Array, tokens: Array, chunk: int) -> Compared:
    from flax import nnx

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
        said, other_said = first.argmax(-1), second.argmax(-1)
        return Compared(divergence, loss, other_loss, said == x[2], other_said == x[2], said == other_said)

    parts = jax.lax.map(part, (cut(states), cut(other), cut(following)))
    whole = Compared(*(x.reshape(-1)[: b * t].reshape(b, t) for x in parts))
    last = jnp.arange(t) == t - 1
    ends = {name: jnp.where(last, 0, getattr(whole, name)) for name in ("loss", "other_loss")}
    ends |= {name: getattr(whole, name) & ~last for name in ("right", "other_right")}
    return whole._replace(**ends)
