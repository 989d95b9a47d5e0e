"""hads.Attention in a model that is not ours: prompts, chunks, new tokens, packed and padded sequences, gradients."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import hads_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_model import TINY

import xsake
from xsake import hads
from xsake.hads.profile.by_length import forced_share, kept_by_length
from xsake.hads.selection.pooled_keys import PooledKeys
from xsake.kernels_xla_ref import oracle
from xsake.model.network.cache import KVCache

LENGTH, BLOCK = 200, 16
PROFILE = case.random_profile(layers=2, block=BLOCK)
WINDOWED = dataclasses.replace(PROFILE, window=70)
CLOSE = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


def qkv(seed: int = 0, length: int = LENGTH, batch: int = 2) -> tuple[jax.Array, ...]:
    query, key = case.random_inputs(seed, length, PROFILE, batch)
    value = np.random.default_rng(seed + 1).standard_normal(key.shape).astype(np.float32)
    return jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)


def always(budget: float, **options: Any) -> hads.Attention:
    return hads.Attention(PROFILE, budget, policy="always", **options)


# Expected results come from the dense oracle, which compiles in a third of the time of a block-sparse program.
expected = jax.jit(oracle.attention, static_argnames=("is_causal", "local_window_size", "scale"))


@pytest.fixture(scope="module")
def dense() -> Any:
    return expected(*qkv(), is_causal=True)


@pytest.fixture(scope="module")
def chosen() -> xsake.BlockMask:
    """The blocks of layer 1 at 60%."""
    return jax.jit(lambda q, k: hads.select(q, k, PROFILE, 0.6, layer=1))(*qkv()[:2])


def traced(attention: hads.Attention, **rules: Any) -> Any:
    """With a traced layer."""
    return jax.jit(lambda q, k, v, layer: attention(q, k, v, layer=layer, **rules))


def test_all_blocks_are_dense_attention(dense: Any):
    CLOSE(traced(always(1.0))(*qkv(), 1), dense)


def test_a_traced_layer_has_the_blocks_of_select_also_where_it_is_mapped(chosen: xsake.BlockMask):
    @jax.jit
    def one_by_one(q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array) -> jax.Array:
        return jax.vmap(lambda q, k, v: always(0.6)(q[None], k[None], v[None], layer=layer)[0])(q, k, v)

    CLOSE(one_by_one(*qkv(), 1), expected(*qkv(), chosen))


def test_gradients_are_those_of_the_mask(chosen: xsake.BlockMask):
    def gradients(attend: Any) -> Any:
        return jax.jit(jax.grad(lambda *x: jnp.square(attend(*x)).sum(), (0, 1, 2)))(*qkv())

    wanted = gradients(lambda q, k, v: oracle.attention(q, k, v, chosen))
    found = gradients(jax.checkpoint(lambda q, k, v: always(0.6)(q, k, v, layer=1)))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), found, wanted)


@pytest.mark.parametrize("budget", [1.0, pytest.param(0.6, marks=pytest.mark.slow)])
def test_chunks_of_a_prompt(budget: float, dense: Any):
    """At 100% they are dense attention; else the counts of the chunks sum to those of the prompt."""
    query, key, value = qkv()
    room = ((0, 0), (0, 20), (0, 0), (0, 0))  # slots that are left hold anything
    cache = [jnp.pad(x, room, constant_values=9.0) for x in (key, value)]
    attention = always(budget)
    ends = [0, 96, 176, 200]  # the first, one in between, the last
    parts = [
        jax.jit(partial(attention, layer=1, start=start))(query[:, start:end], *cache)
        for start, end in itertools.pairwise(ends)
    ]
    found = jnp.concatenate(parts, 1)
    assert np.isfinite(found).all() and found.shape == query.shape
    if budget == 1.0:
        CLOSE(found, dense)


@pytest.mark.parametrize("profile", [PROFILE, dataclasses.replace(PROFILE, block_q=3 * BLOCK)], ids=["square", "tall"])
@pytest.mark.parametrize("window", [None, 70])
def test_counts_of_chunks_sum_to_those_of_the_prompt(profile: hads.HadsProfile, window: int | None):
    profile = dataclasses.replace(profile, window=window)
    kept, there = kept_by_length(profile, 0.85, 1.0, LENGTH)
    assert (np.diff(kept, axis=0) >= 0).all() and (kept <= there[:, None]).all() and not kept[0].any()
    for number in (1, 4, 7, len(kept) - 1):
        grid = profile.grid(number * BLOCK)
        share = max(0.85, forced_share(grid))
        assert (there[number], kept[number].sum()) == (4 * grid.blocks, round(share * 2 * 4 * grid.blocks))
    np.testing.assert_array_equal(kept[-1], hads.layer_counts(profile, share, grid.length))


@pytest.mark.parametrize("budget", [pytest.param(1.0, marks=pytest.mark.slow), 0.7])
def test_padding_on_either_side_changes_no_text(budget: float):
    """Texts of 200 and 150 tokens: padded behind, padded before and alone, each has the same result."""
    lengths, pads = np.array([200, 150], np.int32), np.array([0, 50], np.int32)
    arrays = qkv()
    attention = always(budget)
    behind = jax.jit(lambda *x: attention(*x, layer=0, lengths=lengths))(*arrays)
    moved = [jnp.stack([x[0], jnp.roll(x[1], 50, 0)]) for x in arrays]
    before = jax.jit(lambda *x, pads: attention(*x, layer=0, left_padding=pads))(*moved, pads=pads)
    CLOSE(behind[0], before[0])
    CLOSE(behind[1, :150], before[1, 50:])
    assert not np.asarray(before[1, :50]).any()
    alone = [x[1:, :150] for x in arrays]
    mask = jax.jit(lambda q, k: hads.select(q, k, PROFILE, budget, layer=0))(*alone[:2])
    CLOSE(behind[1:, :150], expected(*alone, mask))


def test_gradients_of_texts_with_padding_before_them():
    pads, arrays = np.array([0, 50], np.int32), qkv()
    text = np.arange(LENGTH)[None] >= pads[:, None]
    weight = jnp.asarray(np.cos(np.arange(LENGTH)) * text)[:, :, None, None]

    def gradients(attend: Any) -> Any:
        return jax.jit(jax.grad(lambda *x: (attend(*x) * weight).sum(), (0, 1, 2)))(*arrays)

    found = gradients(lambda *x: always(1.0)(*x, layer=0, left_padding=pads))
    wanted = gradients(lambda *x: oracle.attention(*x, is_causal=True, segment_ids=text.astype(np.int32)))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), found, wanted)


def test_packed_documents_do_not_see_one_another():
    arrays = qkv(batch=1)
    segments = jnp.asarray((np.arange(LENGTH) >= 90)[None].astype(np.int32))
    found = jax.jit(lambda *x: always(1.0)(*x, layer=0, segment_ids=segments))(*arrays)
    CLOSE(found, expected(*arrays, is_causal=True, segment_ids=segments))


@pytest.mark.parametrize("decode, shortest", [pytest.param(1.0, 150, marks=pytest.mark.slow), (0.4, 150), (0.4, 20)])
def test_new_tokens(decode: float | None, shortest: int, dense: Any):
    """Sparsely at 40%; densely where a sequence is too short for it."""
    query, key, value = qkv()
    lengths = jnp.array([200, shortest], jnp.int32)
    last = jnp.take_along_axis(query, (lengths - 1)[:, None, None, None], 1)
    step = jax.jit(lambda *x, lengths: always(0.5, decode=decode)(*x, layer=1, lengths=lengths))
    found = step(last, key, value, lengths=lengths)
    wanted = jnp.stack([dense[0, 199:], dense[1, shortest - 1 : shortest]])
    if decode == 0.4 and shortest == 150:

        @jax.jit
        def given(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            pooled = PooledKeys.empty(batch=2, kv_heads=2, blocks=13, head_dim=8)
            pooled = pooled.write(k, lengths, start=0, block=BLOCK)
            return always(0.5, decode=decode)(q, k, v, layer=1, lengths=lengths, pooled=pooled)

        CLOSE(found, given(last, key, value))
        assert 1e-3 < np.abs(np.asarray(found - wanted)).max() < 1
    else:
        CLOSE(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 3])
def test_new_tokens_of_a_model_with_a_window(tokens: int):
    query, key, value = qkv()
    lengths = jnp.array([200, 130], jnp.int32)
    wanted = xsake.attention(query, key, value, is_causal=True, local_window_size=(69, 0))
    last = [jnp.stack([x[0, 200 - tokens : 200], x[1, 130 - tokens : 130]]) for x in (query, wanted)]
    attention = hads.Attention(WINDOWED, 1.0, decode=1.0, policy="always")
    found = attention(last[0], key, value, layer=0, lengths=lengths, local_window_size=(69, 0))
    CLOSE(found, last[1])


def test_padding_before_the_texts_of_a_cache_is_not_seen():
    query, *cache = (x[:, :120] for x in qkv(batch=1))
    wanted = expected(query, *cache, is_causal=True)
    moved = [np.pad(x, ((0, 0), (30, 0), (0, 0), (0, 0)), constant_values=7.0) for x in cache]
    rules: dict[str, Any] = dict(layer=0, left_padding=np.array([30], np.int32))

    @jax.jit
    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        chunk = always(0.5)(query[:, 110:], key, value, start=140, **rules)
        new = always(0.5, decode=0.5)(query[:, 119:], key, value, lengths=np.array([150], np.int32), **rules)
        return chunk, new

    chunk, new = run(query, *moved)
    CLOSE(chunk, wanted[:, 110:])
    CLOSE(new, wanted[:, 119:])


def test_scale_and_sinks_are_honoured():
    query, key, value = qkv()
    sinks = jnp.array([0.5, -1.0, 2.0, 0.0])
    attention, lengths = always(1.0, decode=1.0), np.array([200, 200], np.int32)
    rules: dict[str, Any] = dict(scale=0.1, sinks=sinks)

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> tuple[jax.Array, ...]:
        last = attention(q[:, -2:], k, v, layer=0, lengths=lengths, **rules)
        whole, back = jax.vjp(lambda s: attention(q, k, v, layer=0, **rules | {"sinks": s}), sinks)
        return whole, last, *back(jnp.ones_like(whole))

    whole, last, gradient = run(query, key, value, sinks)
    wanted = expected(query, key, value, is_causal=True, **rules)
    CLOSE(whole, wanted)
    CLOSE(last, wanted[:, -2:])
    assert np.abs(gradient).min() > 0


def test_our_own_model_reads_and_writes_with_it():
    """A prompt into an empty cache, and the token after it from the filled one, with all blocks as densely."""
    model = case.one_layer()
    tokens = jnp.asarray(np.stack([prompt[:150] for prompt in case.PROMPTS]), jnp.int32)
    attention = hads.Attention(case.ONE_LAYER, 1.0, decode=1.0, policy="always")

    @nnx.jit
    def run(model: Any, tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, jax.Array]:
        first, filled = model(tokens[:, :-1], cache=cache, attention=attention)
        return first, model(tokens[:, -1:], cache=filled, attention=attention)[0]

    found = jnp.concatenate(run(model, tokens, KVCache.empty(TINY, batch=2, capacity=160, dtype=jnp.float32)), 1)
    wanted = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


def test_the_policy_says_what_runs():
    attention = hads.Attention(HUGE, 0.1, decode=0.1)
    guess = ": a guess, for no race of such calls on 'a chip' is known (xsake autotune --hads)"

    def said(**call: Any) -> str:
        return str(hads.explain(attention, device="a chip", **call))

    assert said(queries=2048) == (
        f"dense: 2048 tokens are fewer than the 4096 from which on a sparse prompt is faster{guess}"
    )
    assert said(queries=4096).startswith("18.3% of the blocks: 9.1% are always on, and with fewer than 2 times as many")
    assert said(queries=32768) == f"10.0% of the blocks: sparse from 4096 tokens on{guess}"
    assert said(queries=4096, training=True).startswith(
        "dense: 4096 tokens are fewer than the 8192 from which on sparse t"
    )
    assert said(queries=512, keys=32768) == said(queries=32768)
    assert said(queries=1, keys=32768).startswith(
        "dense: 32768 cached tokens of all sequences are fewer than the 524288"
    )
    many = said(queries=1, keys=32768, batch=32)
    assert many == (
        f"10.0% of the blocks: sparse from 524288 cached tokens of all sequences on{guess}; densely while a sequence "
        "has 1856 tokens or fewer"
    )
    assert "there is no budget" in str(hads.explain(hads.Attention(HUGE, 0.1), queries=1, keys=32768))
    everywhere = dataclasses.replace(attention, policy="always")
    assert str(hads.explain(everywhere, queries=2048)) == "17.8% of the blocks: 17.8% are always on"
    with pytest.raises(ValueError, match="queries=9 must be at least 1, and at most the 8 keys"):
        said(queries=9, keys=8)


@pytest.mark.parametrize(
    "call, why",
    [
        (dict(queries=64, left_padding=True, bias=True), "a bias belongs to places"),
        (dict(queries=20, keys=64, left_padding=True), "the cache's blocks are not those of the texts"),
        (dict(queries=1, keys=64, left_padding=True), "the cache's blocks are not those of the texts"),
        (dict(queries=64, layer=1), "this layer has a window, and others have none"),
        (dict(queries=9, keys=10, training=True), None),
    ],
)
def test_what_hads_does_not_choose_for_is_told(call: dict[str, Any], why: str | None):
    attention = hads.Attention(dataclasses.replace(PROFILE, windowed=(1,)), 0.9, decode=0.9, policy="always")
    if why is None:
        with pytest.raises(ValueError, match="training=True is of whole sequences: got 9 queries and 10 keys"):
            hads.explain(attention, **call)
    else:
        assert why in hads.explain(attention, **call).why


HUGE = dataclasses.replace(PROFILE, block=64, block_q=64)


def test_auto_runs_short_sequences_densely(dense: Any):
    CLOSE(hads.Attention(PROFILE, 0.5)(*qkv(), layer=0), dense)


def test_a_layer_with_a_window_is_left_alone_where_others_have_none(chosen: xsake.BlockMask):
    """A model of three layers; the profile has the first and the last."""
    attention = hads.Attention(dataclasses.replace(PROFILE, windowed=(1,)), 0.6, policy="always")
    query, key, value = qkv()
    rules = dict(is_causal=True, local_window_size=(29, 0))
    wanted = expected(query, key, value, **rules)
    CLOSE(jax.jit(partial(attention, layer=1, **rules))(query, key, value), wanted)
    CLOSE(jax.jit(partial(attention, layer=1, start=192, **rules))(query[:, 192:], key, value), wanted[:, 192:])
    CLOSE(jax.jit(partial(attention, layer=2))(query, key, value), expected(query, key, value, chosen))
    with pytest.raises(TypeError, match="layer must be an int for a model in which only some layers have a window"):
        traced(attention)(query, key, value, 1)


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda q, k, v: always(0.5)(q, k, v, layer=2), ValueError, "layer=2 must be an int from 0 to 1"),
        (lambda q, k, v: always(0.5)(q, k, v, layer=1.0), TypeError, "layer=1.0 must be the layer's number"),
        (
            lambda q, k, v: always(0.5)(q, k, v, layer=0, lengths=np.array([9])),
            ValueError,
            r"lengths of int64\(1,\) must",
        ),
        (lambda q, k, v: always(0.5)(q, k, v, layer=0, left_padding=[0, -1]), ValueError, r"=\[0, -1\] must be from 0"),
        (lambda q, k, v: always(0.5)(q, k, v, layer=0, segment_ids=(q, k)), ValueError, "give one array"),
        (lambda q, k, v: always(0.5)(q, q, q, layer=0), ValueError, r"is for .*=\(4, 2, 8\).* have \(4, 4, 8\)"),
        (lambda q, k, v: always(0.5)(q[:, 9:], k, v, layer=0), ValueError, "191 queries and 200 keys: say where"),
        (lambda q, k, v: always(0.5)(q, k, v, layer=0, dropout_rate=0.1), NotImplementedError, "dropout_rate=0.1"),
        (lambda q, k, v: always(0.5)(q, k, v, layer=0, is_causal=False), NotImplementedError, "is_causal=False"),
        (lambda q, k, v: always(0.5)(q, k, v, layer=0, local_window_size=(9, 0)), ValueError, "a window of 10 tokens"),
        (lambda q, k, v: hads.Attention(WINDOWED, 0.5)(q, k, v, layer=0), ValueError, "has no window, and the profile"),
        (lambda q, k, v: always(0.5)(q, k, v, layer=0, start=8), ValueError, "200 queries from token 8 on need 208"),
        (lambda q, k, v: always(0.5)(q, k, v, layer=0, start=jnp.int32(0)), TypeError, "must be an int that is known"),
        (lambda q, k, v: always(0), ValueError, "budget=0 must be a share"),
        (lambda q, k, v: hads.Attention(PROFILE, 0.5, policy="never"), ValueError, "policy='never' must be"),
    ],
)
def test_wrong_calls(call: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call(*qkv())
