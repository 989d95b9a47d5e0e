"""The chunked loss: the value and gradients of the plain loss, without all logits at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sweep import sweep

from xsake.model.training.loss import next_token_loss

BATCH, LENGTH, WIDTH, VOCAB = 3, 20, 16, 50


def plain(states, weight, targets):
    logits = jnp.matmul(states.astype(jnp.float32), weight)
    loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    return jnp.where(targets >= 0, loss, 0).sum() / (targets >= 0).sum().astype(jnp.float32)


def inputs(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    targets = jax.random.randint(keys[2], (BATCH, LENGTH), -5, VOCAB)  # some are not counted
    return (
        jax.random.normal(keys[0], (BATCH, LENGTH, WIDTH), dtype),
        jax.random.normal(keys[1], (WIDTH, VOCAB)),
        jnp.maximum(targets, -1),
    )


@pytest.mark.parametrize("chunk", sweep([1, 7, 30, 1000], slow=[1, 30]))
def test_same_as_the_plain_loss_whatever_the_chunk(chunk):
    states, weight, targets = inputs()
    loss, gradients = jax.jit(jax.value_and_grad(lambda s, w: 3.0 * next_token_loss(s, w, targets, chunk), (0, 1)))(
        states, weight
    )
    expected, reference = jax.jit(jax.value_and_grad(lambda s, w: 3.0 * plain(s, w, targets), (0, 1)))(states, weight)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    alone = jax.jit(lambda s, w: 3.0 * next_token_loss(s, w, targets, chunk))(states, weight)  # without gradients
    np.testing.assert_allclose(alone, expected, rtol=1e-6)
    for got, want in zip(gradients, reference, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("chunk", sweep([13, 1000], slow=[1000]))
def test_bfloat16_states_with_float32_weights(chunk, transposed):
    """Gradients have the dtypes of their inputs, and the errors of bfloat16. Tied weights are transposed."""
    states, weight, targets = inputs(jnp.bfloat16)
    weight = weight.astype(jnp.bfloat16).astype(jnp.float32)  # the same numbers for both

    def loss(s, w):
        return next_token_loss(s, w.T if transposed else w, targets, chunk)

    got, (d_states, d_weight) = jax.jit(jax.value_and_grad(loss, (0, 1)))(states, weight.T if transposed else weight)
    of_plain = jax.jit(jax.value_and_grad(lambda s, w: plain(s, w, targets), (0, 1)))
    want, (r_states, r_weight) = of_plain(states, weight)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert d_states.dtype == jnp.bfloat16 and d_weight.dtype == jnp.float32
    for a, b in ((d_states, r_states), (d_weight.T if transposed else d_weight, r_weight)):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(a - b).max() < 2**-7 * np.abs(b).max()


def test_all_logits_never_exist():
    """The largest array of the compiled step, backward included, is a chunk of logits or the weight."""
    batch, length, vocab, chunk = 4, 256, 4096, 64
    states, weight = jnp.zeros((batch, length, 8), jnp.bfloat16), jnp.zeros((8, vocab))
    targets = jnp.zeros((batch, length), jnp.int32)
    run = jax.jit(jax.grad(lambda s, w: next_token_loss(s, w, targets, chunk), (0, 1)))
    used = run.lower(states, weight).compile().memory_analysis().temp_size_in_bytes
    assert used < batch * length * vocab * 4 / 2


def test_no_target_at_all_is_zero():
    states, weight, targets = inputs()
    nothing = jnp.full_like(targets, -1)
    loss, gradient = jax.jit(jax.value_and_grad(lambda s: next_token_loss(s, weight, nothing, 7)))(states)
    assert loss == 0 and not np.any(gradient)
