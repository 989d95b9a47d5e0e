"""The transformer: its arithmetic, its masks, packed documents, its cache, its mesh."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sweep import sweep
from tiny_model import LENGTH, TINY, TOKENS, build, run

import xsake
from xsake.model import KVCache, Transformer

# One worker for the tests of the model: it has its programs.
pytestmark = pytest.mark.xdist_group("model")


@pytest.fixture(scope="module")
def model() -> Transformer:
    return build()


@pytest.fixture(scope="module")
def logits(model):
    return run(model, TOKENS)


def reference(model: Transformer, tokens: np.ndarray) -> np.ndarray:
    """The same model in float64, a token and a head at a time where that is the plainest way to say it."""
    config, weights = model.config, jax.tree.map(np.float64, nnx.to_pure_dict(nnx.state(model)))
    frequency = config.rope_base ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    turns = config.rope_context * frequency / (2 * np.pi)  # Llama 3 slows frequencies that turn seldom
    fast = np.clip((turns - config.rope_low) / (config.rope_high - config.rope_low), 0, 1)
    frequency = frequency * ((1 - fast) / config.rope_factor + fast)
    turn = np.exp(1j * np.arange(len(tokens))[:, None] * frequency)

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale

    def rotate(x):
        half = config.head_dim // 2
        turned = (x[:, :half] + 1j * x[:, half:]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    x = weights["embed"]["embedding"][tokens]
    for layer in range(config.layers):
        block = weights["blocks"][layer]
        y = norm(x, block["attention_norm"]["scale"])
        q, k, v = (
            y @ block["attention"][name]["kernel"] + block["attention"][name].get("bias", 0)
            for name in ("query", "key", "value")
        )
        back = np.arange(len(tokens))[:, None] - np.arange(len(tokens))
        sees = (back >= 0) & (back < (config.window_of(layer) or len(tokens)))
        heads = []
        for head in range(config.q_heads):
            own = slice(head * config.head_dim, (head + 1) * config.head_dim)
            group = head // (config.q_heads // config.kv_heads)
            shared = slice(group * config.head_dim, (group + 1) * config.head_dim)
            head_q, head_k = q[:, own], k[:, shared]
            if config.qk_norm:
                head_q = norm(head_q, block["attention"]["query_norm"]["scale"])
                head_k = norm(head_k, block["attention"]["key_norm"]["scale"])
            p = np.exp(rotate(head_q) @ rotate(head_k).T / np.sqrt(config.head_dim)) * sees
            heads.append(p / p.sum(-1, keepdims=True) @ v[:, shared])
        x = x + np.concatenate(heads, -1) @ block["attention"]["output"]["kernel"]
        y = norm(x, block["mlp_norm"]["scale"])
        gate = y @ block["mlp"]["gate"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ block["mlp"]["up"]["kernel"])) @ block["mlp"]["down"]["kernel"]
    x = norm(x, weights["norm"]["scale"])
    return x @ (weights["embed"]["embedding"].T if config.tied else weights["head"]["kernel"])


CONFIGS = {
    "tied": {},
    "Llama 3": dict(tied=False, rope_factor=8.0, rope_context=32),
    "Qwen2 with windows": dict(qkv_bias=True, window=7, window_from=1),
    "Qwen3": dict(qk_norm=True, head_dim=24),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_a_plain_implementation(name):
    model = build(config=dataclasses.replace(TINY, **CONFIGS[name]))
    logits = run(model, TOKENS)
    assert logits.dtype == jnp.float32
    for row, tokens in zip(logits, TOKENS, strict=True):
        np.testing.assert_allclose(row, reference(model, tokens), rtol=2e-4, atol=2e-4)


def test_bfloat16_keeps_float32_weights_and_logits(logits):
    model = build(dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.float32)}
    low = run(model, TOKENS)
    assert low.dtype == jnp.float32
    assert jnp.abs(low - logits).mean() < 0.05 * jnp.abs(logits).mean()


def test_jax_attention_can_stand_in(logits):
    np.testing.assert_allclose(
        run(build(attention_fn=jax.nn.dot_product_attention), TOKENS), logits, rtol=1e-4, atol=1e-4
    )


def sparse(layer, query, key):
    """Heads of the first layer attend to a window, heads of the second layer also to the first block."""
    options = dict(block_q=8, block_kv=8, window=8)
    return xsake.patterns.sink_window(query.shape[1], key.shape[1], sink=8 * layer, **options)


def test_mask_fn_gives_each_layer_its_mask(model, logits):
    seen = []

    def mask_fn(layer, query, key):
        seen.append((layer, query.shape, key.shape))
        return sparse(layer, query, key)

    masked = run(model, TOKENS, mask_fn=mask_fn)
    shapes = (2, LENGTH, TINY.q_heads, TINY.head_dim), (2, LENGTH, TINY.kv_heads, TINY.head_dim)
    assert seen == [(0, *shapes), (1, *shapes)]
    np.testing.assert_allclose(
        masked[:, :16], logits[:, :16], rtol=1e-4, atol=1e-4
    )  # all that they see is in the window
    assert jnp.abs(masked - logits)[:, 24:].max() > 0.1


def test_a_mask_without_a_rule_does_not_leak_the_future(model, logits):
    mask = xsake.patterns.dense(LENGTH, LENGTH, block_q=16, block_kv=16)
    np.testing.assert_allclose(run(model, TOKENS, mask_fn=lambda *_: mask), logits, rtol=1e-4, atol=1e-4)


def test_packed_documents_do_not_see_each_other(model):
    cut = LENGTH // 2  # one program for both
    segments = np.arange(LENGTH)[None] >= cut
    positions = np.concatenate([np.arange(cut), np.arange(LENGTH - cut)])[None]
    packed = run(model, TOKENS, segment_ids=segments.astype(np.int32), positions=positions)
    for part in (slice(cut), slice(cut, None)):
        np.testing.assert_allclose(packed[:, part], run(model, TOKENS[:, part]), rtol=1e-4, atol=1e-4)


def gradient(model, **options):
    """Loss and gradients of a forward with masks and segments."""
    segments = (np.arange(LENGTH)[None] // 25).astype(np.int32)

    def loss(state):
        logits = nnx.merge(graph, state)(TOKENS, mask_fn=sparse, segment_ids=segments, **options)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], TOKENS[:, 1:, None], -1).mean()

    graph, state = nnx.split(model)
    return jax.jit(jax.value_and_grad(loss))(state)


@pytest.fixture(scope="module")
def plain_gradient(model):
    return gradient(model)


@pytest.mark.slow
def test_remat_changes_nothing(model, plain_gradient):
    again = gradient(model, remat=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plain_gradient, again)


def make_mesh(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


@pytest.mark.slow
def test_a_mesh_gives_the_same_loss_and_gradients(model, plain_gradient):
    sharded = gradient(model, mesh=make_mesh(data=2, model=2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plain_gradient, sharded)


@pytest.mark.parametrize("axes", sweep([{"model": 2}, {"data": 2}], slow=[{"data": 2}]))
def test_a_mesh_may_lack_an_axis(model, logits, axes):
    np.testing.assert_allclose(run(model, TOKENS, mesh=make_mesh(**axes)), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("axes", "message"), [({"data": 4}, "2 sequences"), ({"model": 4}, "2 KV heads")])
def test_a_mesh_that_does_not_divide_is_refused(model, axes, message):
    with pytest.raises(ValueError, match=f"{message} cannot be divided over the mesh's {next(iter(axes))}=4"):
        run(model, TOKENS, mesh=make_mesh(**axes))


def test_gradients_of_the_projection():
    """`_project` defines its own derivative; it agrees with that of a plain product to the rounding of the dtype."""
    states, cotangent = (jax.random.normal(jax.random.key(i), (2, 8, n)) for i, n in ((0, 64), (1, 512)))

    def gradients(model):
        graph, state = nnx.split(model)
        _, pull = jax.vjp(lambda state, x: nnx.merge(graph, state).logits(x), state, states.astype(model.dtype))
        state, states_gradient = pull(cotangent)
        return state["embed"]["embedding"][...], states_gradient.astype(jnp.float32)

    exact = build()
    expected = jnp.einsum("btv,btw->vw", cotangent, states), cotangent @ exact.embed.embedding[...]
    for model, error in ((exact, 1e-6), (build(dtype=jnp.bfloat16), 0.01)):
        for found, want in zip(gradients(model), expected, strict=True):
            assert jnp.linalg.norm(found - want) < error * jnp.linalg.norm(want)


def empty(batch: int = 2, capacity: int = 64) -> KVCache:
    return KVCache.empty(TINY, batch=batch, capacity=capacity, dtype=jnp.float32)


@pytest.mark.parametrize("parts", sweep([[LENGTH], [20, 1, 1, 18]], slow=[[LENGTH]]))
def test_cached_logits_are_the_uncached_ones(model, logits, parts):
    """A prompt, then a token at a time, then several at once."""
    cache, found, start = empty(), [], 0
    for length in parts:
        part, cache = run(model, TOKENS[:, start : start + length], cache=cache)
        found.append(part)
        start += length
    np.testing.assert_allclose(jnp.concatenate(found, 1), logits, rtol=2e-4, atol=2e-4)
    assert cache.length.tolist() == [LENGTH, LENGTH]


def test_cached_sequences_may_differ_in_length(model):
    """The shorter prompt is padded; its padding is overwritten by the tokens that follow."""
    lengths = np.array([20, 11], np.int32)
    _, cache = run(model, TOKENS[:, :20], cache=empty())
    cache = dataclasses.replace(cache, length=jnp.asarray(lengths))
    following = TOKENS[:, 30:33]
    for step in range(3):
        logits, cache = run(model, following[:, step : step + 1], cache=cache)
    alone = np.zeros_like(TOKENS)  # what stands after the last token changes nothing
    for row, length in enumerate(lengths):
        alone[row, : length + 3] = [*TOKENS[row, :length], *following[row]]
    np.testing.assert_allclose(logits[:, 0], run(model, alone)[[0, 1], lengths + 2], rtol=2e-4, atol=2e-4)


def test_a_token_past_the_capacity_is_not_a_number(model):
    """The length of a cache is not known while tracing, so that no error can be raised."""
    _, cache = run(model, TOKENS[:, :20], cache=empty())
    cache = dataclasses.replace(cache, length=jnp.full(2, cache.capacity - 1, jnp.int32))
    for fits in (True, False):
        logits, cache = run(model, TOKENS[:, 20:21], cache=cache)
        assert jnp.isfinite(logits).all() if fits else jnp.isnan(logits).all()


@pytest.mark.slow  # meshes and caches are tested above, each by itself
def test_a_cache_under_a_mesh(model, logits):
    mesh = make_mesh(data=2, model=2)
    _, cache = run(model, TOKENS[:, :-1], cache=empty(), mesh=mesh)
    last, _ = run(model, TOKENS[:, -1:], cache=cache, mesh=mesh)
    np.testing.assert_allclose(last[:, 0], logits[:, -1], rtol=2e-4, atol=2e-4)


def test_sparse_prefill(model):
    """Prefill takes the masks that a forward without a cache takes."""
    cached, cache = run(model, TOKENS, cache=empty(), mask_fn=sparse)
    np.testing.assert_allclose(cached, run(model, TOKENS, mask_fn=sparse), rtol=2e-4, atol=2e-4)
    with pytest.raises(ValueError, match="layer 0's mask counts causality from query 0"):
        run(model, TOKENS[:, :2], cache=cache, mask_fn=sparse)


@pytest.mark.slow  # test_model_generation.py prefills with masks and decodes
def test_masks_of_later_tokens(model):
    _, cache = run(model, TOKENS, cache=empty(), mask_fn=sparse)

    def everything(layer, query, key):
        return xsake.patterns.dense(query.shape[1], key.shape[1], block_q=16, block_kv=16)

    masked, plain = (run(model, TOKENS[:, :2], cache=cache, mask_fn=f)[0] for f in (everything, None))
    np.testing.assert_allclose(masked, plain, rtol=2e-4, atol=2e-4)


def test_wrong_calls_are_refused(model):
    with pytest.raises(ValueError, match="length 513, beyond the model's context of 512"):
        run(model, np.zeros((1, 513), np.int32))
    with pytest.raises(ValueError, match="capacity=513 must be between 1 and the model's context of 512"):
        empty(capacity=513)
    with pytest.raises(ValueError, match="batch=0 must be at least 1"):
        empty(batch=0)
    with pytest.raises(ValueError, match=r"\(2, 40\) do not fit a cache of 2 sequences with capacity 39"):
        run(model, TOKENS, cache=empty(capacity=39))
    with pytest.raises(ValueError, match=r"\(2, 40\) do not fit a cache of 3 sequences"):
        run(model, TOKENS, cache=empty(batch=3))
    with pytest.raises(ValueError, match="segment_ids cannot be used with a cache"):
        run(model, TOKENS, cache=empty(), segment_ids=np.zeros((1, LENGTH), np.int32))
