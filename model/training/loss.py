"""Next-token cross-entropy whose logits exist only one chunk at a time, forward and backward.

The forward pass computes the gradient of a chunk together with the chunk's logits, so that logits are neither stored
for the backward pass nor computed again: three products with the vocabulary, as without chunks, and memory for one
chunk.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def next_token_loss(
    states: Float[Array, "B T width"], weight: Float[Array, "width vocab"], targets: Int[Array, "B T"], chunk: int
) -> Float[Array, ""]:
    """Mean of -log p(target) in nats over the targets that are not negative; about `chunk` tokens at a time.

    >>> import jax.numpy as jnp
    >>> loss = next_token_loss(jnp.ones((1, 2, 4)), jnp.zeros((4, 8)), jnp.zeros((1, 2), jnp.int32), 1)
    >>> round(float(loss), 4)
    2.0794
    """
    loss, _ = _run(states, weight, targets, chunk, with_gradient=False)
    return loss


def _forward(states: Array, weight: Array, targets: Array, chunk: int) -> tuple:
    return _run(states, weight, targets, chunk, with_gradient=True)


def _backward(chunk: int, gradients: tuple, cotangent: Array) -> tuple:
    d_states, d_weight = gradients
    return d_states * cotangent.astype(d_states.dtype), d_weight * cotangent.astype(d_weight.dtype), None


next_token_loss.defvjp(_forward, _backward)


def _run(states: Array, weight: Array, targets: Array, chunk: int, *, with_gradient: bool) -> tuple:
    """(loss, (d_states, d_weight)), or (loss, None) without gradients."""
    batch, length, width = states.shape
    chunks = max(1, min(length, -(-batch * length // chunk)))
    size = -(-length // chunks)
    padding = ((0, 0), (0, chunks * size - length))
    parts = (
        jnp.pad(states, (*padding, (0, 0))).reshape(batch, chunks, size, width).swapaxes(0, 1),
        jnp.pad(targets, padding, constant_values=-1).reshape(batch, chunks, size).swapaxes(0, 1),
    )
    scale = 1.0 / jnp.maximum((targets >= 0).sum(), 1).astype(jnp.float32)
    narrow = weight.astype(states.dtype)

    def step(carry: tuple, part: tuple) -> tuple:
        total, d_weight = carry
        states, targets = part
        logits = jnp.matmul(states, narrow, preferred_element_type=jnp.float32)
        lse = jax.nn.logsumexp(logits, -1, keepdims=True)
        # The target's logit by comparison, not by index, so that the vocabulary may lie on several devices.
        hit = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
        valid = targets[..., None] >= 0
        picked = jnp.where(hit, logits, 0.0).sum(-1, keepdims=True)
        total += jnp.where(valid, lse - picked, 0.0).sum() * scale
        if not with_gradient:
            return (total, None), None
        d_logits = jnp.where(valid, jnp.exp(logits - lse) - hit.astype(jnp.float32), 0.0) * scale
        d_logits = d_logits.astype(states.dtype)
        d_states = jnp.matmul(d_logits, narrow.T)
        # With two dimensions: XLA's CPU compiler cannot run some layouts of the same product with three dimensions.
        flat_states, flat_d_logits = states.reshape(-1, width), d_logits.reshape(-1, weight.shape[1])
        d_weight += jnp.matmul(flat_states.T, flat_d_logits, preferred_element_type=jnp.float32)
        return (total, d_weight), d_states

    start: Any = (jnp.float32(0), jnp.zeros(weight.shape, jnp.float32) if with_gradient else None)
    result: Any = jax.lax.scan(step, start, parts)
    (loss, d_weight), d_states = result
    if d_weight is None:
        return loss, None
    d_states = d_states.swapaxes(0, 1).reshape(batch, chunks * size, width)[:, :length]
    return loss, (d_states, d_weight.astype(weight.dtype))
