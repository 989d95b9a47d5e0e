"""HADS for new tokens: exact counts from pooled keys, the gathered attention, and generation with it."""

from __future__ import annotations

import dataclasses
from functools import partial

import hads_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import TINY, build

from xsake import hads
from xsake.hads.profile.estimator import bucket_of
from xsake.hads.selection.step import select_step, step_count
from xsake.kernels_xla_ref.gathered import attend_blocks
from xsake.model import HadsBudget, KVCache, generate

PROFILE = case.random_profile(head_dim=16)
BLOCK, CAPACITY, LENGTHS = PROFILE.block, 320, np.array([301, 190], np.int32)


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    query, *kv = (
        rng.standard_normal((2, t, h, 16)).astype(np.float32) for t, h in ((1, 4), (CAPACITY, 2), (CAPACITY, 2))
    )
    return tuple(map(jnp.asarray, (query, *kv)))


@pytest.fixture(scope="module")
def pooled(inputs):
    empty = hads.PooledKeys.empty(batch=2, kv_heads=2, blocks=CAPACITY // BLOCK, head_dim=16)
    return empty.write(inputs[1], jnp.asarray(LENGTHS), start=0, block=BLOCK)


@partial(jax.jit, static_argnames=("budget", "room"))
def chosen_of(query, pooled, lengths, budget, room):
    weights = hads.LayerWeights.of(PROFILE, 1)
    return select_step(query, pooled, weights, lengths, budget=budget, room=room, block=BLOCK, rule=PROFILE.rule)


def test_counts_are_exact_and_forced_blocks_are_on(inputs, pooled):
    chosen = chosen_of(inputs[0], pooled, LENGTHS, budget=0.4, room=step_count(20, 2, 0.4, PROFILE.rule))
    for row, length in enumerate(LENGTHS):
        blocks = -(-int(length) // BLOCK)
        entries = [(int(h), int(j)) for h, j, live in zip(*(x[row] for x in chosen), strict=True) if live]
        assert len(entries) == len(set(entries)) == step_count(blocks, 2, 0.4, PROFILE.rule)
        assert {(h, j) for h in (0, 1) for j in (0, blocks - 2, blocks - 1)} <= set(entries)
        assert max(j for _, j in entries) < blocks


def test_the_kept_blocks_have_the_largest_mass_of_their_head(inputs, pooled):
    """Against the estimate in plain numpy, second order in place of the logits with every key."""
    chosen = chosen_of(inputs[0], pooled, LENGTHS, budget=0.4, room=20)
    row, blocks = 0, -(-LENGTHS[0] // BLOCK)
    mean, variance, largest, smallest = (np.float64(x[row, :, :blocks]) for x in pooled)
    estimator, mass = PROFILE.estimator(1), []
    for head in range(4):
        q, k = np.float64(inputs[0][row, 0, head]), head // 2
        tokens = mean[k] @ q / 4 + variance[k] @ (q * q) / 32
        both = np.concatenate([estimator.features[head]] * 2, -1)
        logits = mean[k] @ (both[0] * q) / 4 + variance[k] @ (both[1] * q * q) / 32
        logits += largest[k] @ (both[3] * np.maximum(q, 0)) / 4 + smallest[k] @ (both[3] * np.minimum(q, 0)) / 4
        distance = blocks - 1 - np.arange(blocks)
        logits += estimator.distance[head][bucket_of(distance)] + estimator.tokens[head] * tokens
        logits[0] += estimator.sink[head]
        weight = np.exp(logits - logits.max())
        mass.append(weight / weight.sum())
    for group in (0, 1):
        omega = np.float64(PROFILE.sensitivity[1][2 * group : 2 * group + 2])
        shared = omega @ np.stack(mass[2 * group : 2 * group + 2]) / omega.sum()
        free = [j for j in np.argsort(-shared) if j not in (0, blocks - 2, blocks - 1)]
        kept = {int(j) for h, j, live in zip(*(x[row] for x in chosen), strict=True) if live and h == group}
        kept -= {0, blocks - 2, blocks - 1}
        assert kept == set(free[: len(kept)])


def test_gathered_attention_is_attention_to_the_listed_blocks(inputs, pooled):
    query, key, value = inputs
    poison = jnp.where((np.arange(CAPACITY)[None] < LENGTHS[:, None])[..., None, None], 0, jnp.nan)
    chosen = chosen_of(query, pooled, LENGTHS, budget=0.4, room=24)  # more room than entries
    out = jax.jit(partial(attend_blocks, block_size=BLOCK))(query, key, value + poison, *chosen, jnp.asarray(LENGTHS))
    for row, length in enumerate(LENGTHS):
        for head in range(4):
            live = [int(j) for h, j, on in zip(*(x[row] for x in chosen), strict=True) if on and h == head // 2]
            at = np.concatenate([np.arange(j * BLOCK, min((j + 1) * BLOCK, length)) for j in live])
            logits = np.float64(key[row, at, head // 2]) @ np.float64(query[row, 0, head]) / 4
            p = np.exp(logits - logits.max())
            np.testing.assert_allclose(out[row, 0, head], p @ value[row, at, head // 2] / p.sum(), rtol=1e-4, atol=1e-5)


def test_pooled_keys_follow_the_cache(inputs):
    """Block by block as a prompt is read, and then a token at a time."""
    key = inputs[1]
    whole = hads.PooledKeys.empty(batch=2, kv_heads=2, blocks=20, head_dim=16)
    whole = whole.write(key, jnp.asarray(LENGTHS), start=0, block=BLOCK)
    grown = hads.PooledKeys.empty(batch=2, kv_heads=2, blocks=20, head_dim=16)
    before = jnp.asarray(LENGTHS - 14)
    for start in (0, 160):
        grown = grown.write(key[:, start : start + 160], before, start=start, block=BLOCK)
    step = jax.jit(lambda pooled, lengths: pooled.write_last(key, lengths, block=BLOCK))
    for more in range(1, 15):
        grown = step(grown, before + more)
    for a, b in zip(grown, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_budgets_that_leave_no_choice_are_refused():
    with pytest.raises(ValueError, match=r"a budget of 0.1 for new tokens is below 0.1500, .* with 20 blocks"):
        step_count(20, 2, 0.1, PROFILE.rule)


ONE_LAYER = case.random_profile(layers=1, head_dim=16)
PROMPTS = [np.random.default_rng(n).integers(512, size=length).tolist() for n, length in enumerate((150, 203))]


@pytest.fixture(scope="module")
def model():
    return build(config=dataclasses.replace(TINY, layers=1))


def test_writing_with_all_blocks_is_writing_densely(model):
    dense = generate(model, PROMPTS, max_new_tokens=6, hads=HadsBudget(ONE_LAYER, 0.8))
    assert generate(model, PROMPTS, max_new_tokens=6, hads=HadsBudget(ONE_LAYER, 0.8, decode=1.0)) == dense


@pytest.mark.slow
def test_sequences_are_written_alone_as_in_a_batch(model):
    options = dict(max_new_tokens=6, hads=HadsBudget(ONE_LAYER, 0.8, decode=0.35))
    together = generate(model, PROMPTS, **options)
    assert [generate(model, [prompt], **options)[0] for prompt in PROMPTS] == together


def test_a_full_cache_is_an_error(model):
    cache = KVCache.empty(model.config, batch=1, capacity=8, dtype=jnp.float32)
    with pytest.raises(ValueError, match="the cache is full: it has room for 8 tokens, holds 5, and 4 more are given"):
        model(np.zeros((1, 4), np.int32), cache=KVCache(keys=cache.keys, values=cache.values, length=jnp.array([5])))
