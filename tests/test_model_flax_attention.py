"""`attention_fn` in Flax's own layers, nnx and linen: the numbers of Flax's attention, and no argument ignored."""

from __future__ import annotations

from functools import partial

import hads_case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import chances, normal
from flax import linen, nnx
from sweep import sweep

import xsake
from xsake.hads import select
from xsake.model import attention_fn

LENGTH, WIDTH, HEADS = 48, 32, 4
X = normal(0, (2, LENGTH, WIDTH))
BLOCKS = np.random.default_rng(0).random((HEADS, 3, 3)) < 0.5
SPARSE = xsake.BlockMask.from_blocks(
    BLOCKS | np.eye(3, dtype=bool), block_q=16, block_kv=16, q_len=LENGTH, kv_len=LENGTH, is_causal=True
)
ELEMENTS = jnp.asarray(SPARSE.to_elements())  # [1, heads, T, S], as Flax takes it
CAUSAL = jnp.asarray(np.tri(LENGTH, dtype=np.float32)[None, None].repeat(2, 0))  # as linen.make_causal_mask's


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


MASKS = {"none": None, "causal": CAUSAL, "prefix": jnp.asarray((np.asarray(CAUSAL) > 0) | (np.arange(LENGTH) < 3))}


@pytest.mark.parametrize("layer", sweep([of_nnx, of_linen], slow=[of_linen]))  # which the next test has
@pytest.mark.parametrize("name", sweep(MASKS, slow=["none", "causal"]))
def test_dense_attention_is_flaxs(layer, name):
    mask = MASKS[name]
    np.testing.assert_allclose(layer(X, attention_fn, mask=mask), layer(X, mask=mask), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", sweep([of_nnx, of_linen], slow=[of_nnx]))
def test_block_masks_are_flaxs_with_the_same_elements(layer):
    sparse = layer(X, partial(attention_fn, block_mask=SPARSE, implementation="xla"))
    np.testing.assert_allclose(sparse, layer(X, mask=ELEMENTS), rtol=1e-4, atol=1e-5)
    assert jnp.abs(sparse - layer(X, attention_fn)).max() > 0.01


def test_a_function_chooses_the_blocks_by_the_layers_queries_and_keys():
    x, head_dim = normal(1, (2, 160, WIDTH)), WIDTH // HEADS
    profile = hads_case.random_profile(q_heads=HEADS, kv_heads=HEADS, head_dim=head_dim)
    choose = partial(select, profile=profile, budget=0.7, layer=1)
    found = []

    def watched(query, key):
        assert query.shape == key.shape == (2, 160, HEADS, head_dim)
        found.append(choose(query, key).to_elements())
        return choose(query, key)

    layer = nnx.MultiHeadAttention(num_heads=HEADS, in_features=WIDTH, decode=False, rngs=nnx.Rngs(0))
    layer.attention_fn = partial(attention_fn, block_mask=watched)
    chosen = layer(x)
    layer.attention_fn = nnx.dot_product_attention
    np.testing.assert_allclose(chosen, layer(x, mask=found[0]), rtol=1e-4, atol=1e-5)
    assert 0.3 < found[0].mean() < 0.45 and jnp.abs(chosen - layer(x, mask=found[0].any(1, keepdims=True))).max() > 0.01


def test_block_and_array_masks_together():
    padding = (jnp.arange(LENGTH)[None] < jnp.array([[48], [20]]))[:, None, None]
    both = of_nnx(X, partial(attention_fn, block_mask=SPARSE), mask=padding)
    np.testing.assert_allclose(both[1, :20], of_nnx(X[1:, :20], mask=ELEMENTS[..., :20, :20])[0], rtol=1e-4, atol=1e-5)


def test_causality_by_argument():
    expected = of_nnx(X, mask=CAUSAL)
    np.testing.assert_allclose(of_nnx(X, attention_fn, is_causal=True), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lead", sweep([(), (3,), (2, 3)], slow=[(), (3,)]))
def test_any_number_of_batch_dimensions(lead):
    query, key, value = (normal(i, (*lead, 8, HEADS, 16)) for i in range(3))
    bias = normal(3, (*lead[-1:], HEADS, 8, 8))
    mask = chances(4, (*lead[:1], *(1,) * len(lead[1:]), 1, 8, 8), 0.7)
    with jax.numpy_rank_promotion("allow"):  # as linen does it
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


def decoder(fn):
    layer = nnx.MultiHeadAttention(num_heads=HEADS, in_features=WIDTH, decode=True, rngs=nnx.Rngs(0), attention_fn=fn)
    layer.init_cache((2, LENGTH, WIDTH))
    return layer


_NEW_FLAX = pytest.mark.skipif(not hasattr(nnx, "RoPE"), reason="this Flax, the newest for JAX 0.10, has no nnx.RoPE")


@_NEW_FLAX
def test_decoding_attends_to_the_querys_row_of_a_block_mask():
    ours, theirs = decoder(partial(attention_fn, block_mask=SPARSE)), decoder(nnx.dot_product_attention)
    step = nnx.jit(lambda layer, x, **call: layer(x, **call))
    for i in range(40):
        at = jnp.full((2, 1), i)
        found = step(ours, X[:, i : i + 1], input_positions=at)
        expected = step(theirs, X[:, i : i + 1], mask=jax.lax.dynamic_slice_in_dim(ELEMENTS, i, 1, axis=2))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def one_query(**options):
    query, cache = jnp.ones((2, 1, HEADS, 16)), jnp.ones((2, LENGTH, HEADS, 16))
    return attention_fn(query, cache, cache, block_mask=SPARSE, **options)


def test_each_batch_entry_decodes_at_its_own_position():
    query = normal(1, (2, 1, HEADS, 16))
    key, value = (normal(i, (2, LENGTH, HEADS, 16)) for i in (2, 3))
    decode = jax.jit(lambda *arrays, at: attention_fn(*arrays, block_mask=SPARSE, input_positions=at))
    found = decode(query, key, value, at=jnp.array([[3], [37]]))
    rows = jnp.stack([ELEMENTS[0, :, i : i + 1] for i in (3, 37)])
    expected = jax.jit(nnx.dot_product_attention)(query, key, value, mask=rows)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_positions_outside_the_block_mask():
    with pytest.raises(ValueError, match=r"input_positions must be in \[0, 48\)"):
        one_query(input_positions=jnp.array([[48]]))
    assert jnp.isnan(jax.jit(lambda at: one_query(input_positions=at))(jnp.array([[48]]))).all()


def test_decoding_without_positions_says_what_to_give():
    with pytest.raises(ValueError, match=r"block_mask is for 48 queries and this call has one.*input_positions"):
        one_query()


@_NEW_FLAX
def test_rotary_positions_go_to_a_function_around():
    rope = nnx.RoPE()

    def rotated(query, key, value, *, input_positions, **rest):
        turn = jax.vmap(lambda x: jax.vmap(rope)(x, input_positions), in_axes=-2, out_axes=-2)
        return attention_fn(turn(query), turn(key), value, **rest)

    at = jnp.tile(jnp.arange(7.0, LENGTH + 7), (2, 1))
    shifted, unshifted = (of_nnx(X, rotated, input_positions=x) for x in (at, at - 7))
    np.testing.assert_allclose(shifted, unshifted, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="input_positions are for one query"):
        of_nnx(X, attention_fn, input_positions=at)


def test_rank_promotion_may_be_forbidden():
    query = jnp.ones((2, 3, 8, HEADS, 16))
    bias, mask = jnp.zeros((1, HEADS, 8, 8)), jnp.ones((2, 3, 1, 8, 8), bool)
    with jax.numpy_rank_promotion("raise"):
        assert jax.eval_shape(attention_fn, query, query, query, bias, mask).shape == query.shape


@pytest.mark.parametrize("shape", [(3, 2, 8, HEADS, 16), (6, 8, HEADS, 16)])
def test_batch_dims_that_differ_are_refused(shape):
    query, key = jnp.ones((2, 3, 8, HEADS, 16)), jnp.ones(shape)
    with pytest.raises(ValueError, match="same batch dims"):
        attention_fn(query, key, key)


NAMES = ["default", "fastest", "bfloat16", "high", "tensorfloat32", "bfloat16_3x", "highest", "float32"]
PRECISIONS = [None, *jax.lax.Precision, *NAMES, ("high", "default")]
ONES = jnp.ones((1, 8, HEADS, 16))


@pytest.mark.parametrize(
    "options",
    [dict(dropout_rate=0.1, deterministic=True), *(dict(precision=precision) for precision in PRECISIONS)],
    ids=str,
)
def test_every_precision_of_jax_is_satisfied_and_dropout_that_is_off(options):
    assert jax.eval_shape(partial(attention_fn, **options), ONES, ONES, ONES).shape == ONES.shape


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(dropout_rate=0.1, dropout_rng=jax.random.key(0)), NotImplementedError, "dropout_rate=0.1.*nnx.Dropout"),
        (dict(dropout_rate=-0.1), ValueError, r"dropout_rate must be in the range \[0, 1\), got -0.1"),
        (dict(dropout_rate=float("nan")), ValueError, "dropout_rate"),
        (dict(module=object()), NotImplementedError, "sow_weights.*Flax's own"),
        (dict(precision="TF32_TF32_F32"), NotImplementedError, "precision='TF32_TF32_F32'"),
        (dict(precision=("high", jax.lax.DotAlgorithmPreset.BF16_BF16_F32)), NotImplementedError, "BF16_BF16_F32"),
        (dict(qk_attn_weights_einsum=jnp.einsum), NotImplementedError, "qk_attn_weights_einsum"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        attention_fn(ONES, ONES, ONES, **options)
