"""`attention_fn` in Flax's own layers, nnx and linen: the same numbers as theirs, nothing ignored."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import xsake
from xsake.model import attention_fn

LENGTH, WIDTH, HEADS = 48, 32, 4
X = jax.random.normal(jax.random.key(0), (2, LENGTH, WIDTH))
BLOCKS = np.random.default_rng(0).random((HEADS, 3, 3)) < 0.5
SPARSE = xsake.BlockMask.from_blocks(
    BLOCKS | np.eye(3, dtype=bool), block_q=16, block_kv=16, q_len=LENGTH, kv_len=LENGTH, is_causal=True
)
ELEMENTS = jnp.asarray(SPARSE.to_elements())  # [1, heads, T, S], as Flax takes it
CAUSAL = linen.make_causal_mask(X[..., 0])


def of_nnx(x, fn=None, **call):
    layer = nnx.MultiHeadAttention(
        num_heads=HEADS,
        in_features=WIDTH,
        decode=False,
        rngs=nnx.Rngs(0),
        **({} if fn is None else {"attention_fn": fn}),
    )
    return jax.jit(lambda x: layer(x, **call))(x)


def of_linen(x, fn=None, **call):
    layer = linen.MultiHeadDotProductAttention(num_heads=HEADS, **({} if fn is None else {"attention_fn": fn}))
    return jax.jit(lambda x: layer.apply(layer.init(jax.random.key(0), x), x, **call))(x)


@pytest.mark.parametrize("layer", [of_nnx, of_linen])
@pytest.mark.parametrize("mask", [None, CAUSAL, (CAUSAL > 0) | (jnp.arange(LENGTH) < 3)])
def test_dense_attention_is_flaxs(layer, mask):
    np.testing.assert_allclose(layer(X, attention_fn, mask=mask), layer(X, mask=mask), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [of_nnx, of_linen])
def test_block_masks_are_flaxs_with_the_same_elements(layer):
    sparse = layer(X, partial(attention_fn, block_mask=SPARSE, implementation="xla"))
    np.testing.assert_allclose(sparse, layer(X, mask=ELEMENTS), rtol=1e-4, atol=1e-5)
    assert jnp.abs(sparse - layer(X, attention_fn)).max() > 0.01


def test_block_and_array_masks_together():
    padding = (jnp.arange(LENGTH) < jnp.array([[48], [20]]))[:, None, None]
    both = of_nnx(X, partial(attention_fn, block_mask=SPARSE), mask=padding)
    np.testing.assert_allclose(both[1, :20], of_nnx(X[1:, :20], mask=ELEMENTS[..., :20, :20])[0], rtol=1e-4, atol=1e-5)


def test_causality_by_argument():
    expected = of_nnx(X, mask=CAUSAL)
    np.testing.assert_allclose(of_nnx(X, attention_fn, is_causal=True), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_any_number_of_batch_dimensions(lead):
    query, key, value = (jax.random.normal(jax.random.key(i), (*lead, 8, HEADS, 16)) for i in range(3))
    bias = jax.random.normal(jax.random.key(3), (*lead[-1:], HEADS, 8, 8))
    mask = jax.random.bernoulli(jax.random.key(4), 0.7, (*lead[:1], *(1,) * len(lead[1:]), 1, 8, 8))
    expected = linen.dot_product_attention(query, key, value, bias=bias, mask=mask)
    found = jax.jit(attention_fn)(query, key, value, bias, mask)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_decoding_with_flaxs_cache():
    layers = [
        nnx.MultiHeadAttention(num_heads=HEADS, in_features=WIDTH, decode=True, rngs=nnx.Rngs(0), attention_fn=fn)
        for fn in (attention_fn, nnx.dot_product_attention)
    ]
    step = nnx.jit(lambda layer, x: layer(x))
    for layer in layers:
        layer.init_cache((2, 6, WIDTH))
    for i in range(3):
        ours, theirs = (step(layer, X[:, i : i + 1]) for layer in layers)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_layers_dtype_is_used():
    query = jnp.ones((1, 8, HEADS, 16))
    out = jax.eval_shape(partial(attention_fn, dtype=jnp.bfloat16), query, query, query)
    assert out.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(dropout_rate=0.1, dropout_rng=jax.random.key(0)), "dropout_rate=0.1"),
        (dict(module=object()), "sow_weights"),
        (dict(precision="default"), "precision='default'"),
        (dict(qk_attn_weights_einsum=jnp.einsum), "qk_attn_weights_einsum"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options, message):
    query = jnp.ones((1, 8, HEADS, 16))
    with pytest.raises(NotImplementedError, match=message):
        attention_fn(query, query, query, **options)


def test_dropout_is_no_obstacle_when_it_is_off():
    query = jnp.ones((1, 8, HEADS, 16))
    out = jax.eval_shape(partial(attention_fn, dropout_rate=0.1, deterministic=True), query, query, query)
    assert out.shape == query.shape
