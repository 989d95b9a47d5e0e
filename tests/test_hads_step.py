"""HADS for new tokens: exact counts from pooled keys, the gathered attention, and generation with it."""

from __future__ import annotations

from functools import partial

import hads_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sweep import sweep
from tiny_model import FOUR_PROMPTS

import xsake
from xsake import hads
from xsake.hads.profile.estimator import bucket_of
from xsake.hads.selection.step.blocks import StepRule, select_step, step_count
from xsake.hads.selection.step.mask import step_mask
from xsake.kernels_xla_ref.gathered import attend_blocks
from xsake.model import HadsBudget, KVCache, generate
from xsake.model.generation import sparse_decode
from xsake.model.generation.prefill import read_prompts
from xsake.model.generation.sparse_decode import attend_listed

PROFILE = case.random_profile(head_dim=16)
BLOCK, CAPACITY, LENGTHS = PROFILE.block, 320, np.array([301, 190], np.int32)


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    query, *kv = (
        rng.standard_normal((2, t, h, 16)).astype(np.float32) for t, h in ((1, 4), (CAPACITY, 2), (CAPACITY, 2))
    )
    return tuple(map(jnp.asarray, (query, *kv)))


# Compiled as a whole: else each of its operations would be a program.
write = jax.jit(hads.PooledKeys.write, static_argnames=("start", "block"))


@pytest.fixture(scope="module")
def pooled(inputs):
    empty = hads.PooledKeys.empty(batch=2, kv_heads=2, blocks=CAPACITY // BLOCK, head_dim=16)
    return write(empty, inputs[1], jnp.asarray(LENGTHS), start=0, block=BLOCK)


@partial(jax.jit, static_argnames=("budget", "room"))
def _chosen_of(query, pooled, lengths, budget, room):
    weights = hads.LayerWeights.of(PROFILE, 1)
    return select_step(query, pooled, weights, lengths, StepRule(budget, room, BLOCK, PROFILE.rule))


def chosen_of(*arguments, **options):
    """As NumPy arrays: of JAX's, every index that the tests take would be a program."""
    return jax.tree.map(np.asarray, _chosen_of(*arguments, **options))


def test_the_kept_blocks_have_the_largest_mass_of_their_head(inputs, pooled):
    """Against the estimate in plain numpy, second order in place of the logits with every key."""
    chosen = chosen_of(inputs[0], pooled, LENGTHS, budget=0.4, room=24)  # more room than entries, as below
    row, blocks = 0, -(-LENGTHS[0] // BLOCK)
    kinds = pooled.mean, pooled.variance, pooled.features[..., 3, :], pooled.features[..., 4, :]  # and the extremes
    mean, variance, largest, smallest = (np.float64(x[row, :, :blocks]) for x in kinds)
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


@pytest.mark.parametrize(("tokens", "lengths"), [(1, LENGTHS), (4, np.array([290, 191], np.int32))], ids=["1", "4"])
def test_new_tokens_attend_to_exactly_the_blocks_that_they_share(inputs, tokens, lengths):
    """Exact counts, every token's near blocks on, and softmax over the keys of these blocks.

    The four tokens of the first sequence are in two blocks. What lies past a sequence's end is not read.
    """
    query, (_, key, value) = np.random.default_rng(3).standard_normal((2, tokens, 4, 16)).astype(np.float32), inputs
    pooled = hads.PooledKeys.empty(batch=2, kv_heads=2, blocks=CAPACITY // BLOCK, head_dim=16)
    chosen = chosen_of(
        query, write(pooled, key, jnp.asarray(lengths), start=0, block=BLOCK), lengths, budget=0.4, room=24
    )
    poison = jnp.where((np.arange(CAPACITY)[None] < lengths[:, None])[..., None, None], 0, jnp.nan)
    out = jax.jit(partial(attend_blocks, block_size=BLOCK))(query, key, value + poison, *chosen, jnp.asarray(lengths))
    query, key, value, out = (np.asarray(x, np.float64) for x in (query, key, value, out))
    for row, length in enumerate(lengths):
        entries = [(int(h), int(j)) for h, j, on in zip(*(x[row] for x in chosen), strict=True) if on]
        blocks, first = -(-int(length) // BLOCK), (int(length) - tokens) // BLOCK
        assert len(entries) == len(set(entries)) == step_count(blocks, 2, 0.4, PROFILE.rule, tokens=tokens)
        lists = [sorted(j for h, j in entries if h == k) for k in (0, 1)]
        assert all({0, first - 1, first, blocks - 1} <= set(found) and max(found) < blocks for found in lists)
        for t, head in np.ndindex(tokens, 4):
            at = np.concatenate([np.arange(j * BLOCK, (j + 1) * BLOCK) for j in lists[head // 2]])
            at = at[at <= length - tokens + t]
            p = case.softmax(key[row, at, head // 2] @ query[row, t, head] / 4)
            np.testing.assert_allclose(out[row, t, head], p @ value[row, at, head // 2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", sweep([None, 100], slow=[None]))
def test_a_mask_of_the_blocks_is_attended_as_gathered(inputs, pooled, window):
    weights, lengths = hads.LayerWeights.of(PROFILE, 1), jnp.asarray(LENGTHS)
    step = StepRule(0.4, 24, BLOCK, PROFILE.rule, window=window)

    @jax.jit
    def gathered(query, key, value):
        chosen = select_step(query, pooled, weights, lengths, step)
        return attend_blocks(query, key, value, *chosen, lengths, block_size=BLOCK, window=window)

    @jax.jit
    def listed(query, key, value):
        mask = step_mask(query, pooled, weights, lengths, step, slots=CAPACITY)
        positions = lengths[:, None] - 1, jnp.broadcast_to(jnp.arange(CAPACITY), (2, CAPACITY))
        return attend_listed(query, key, value, mask, positions, window=window)

    np.testing.assert_allclose(listed(*inputs), gathered(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [3, 8])
def test_tokens_on_both_sides_of_a_blocks_edge_see_their_whole_windows(tokens: int):
    """With all blocks, as dense attention: the first of the tokens sees a block more than the last one."""
    window, lengths = 6 * BLOCK - tokens + 3, jnp.array([203, 130], jnp.int32)
    rng = np.random.default_rng(1)
    query, key, value = (
        jnp.asarray(rng.standard_normal((2, t, h, 16)), jnp.float32) for t, h in ((tokens, 4), (224, 2), (224, 2))
    )
    empty = hads.PooledKeys.empty(batch=2, kv_heads=2, blocks=224 // BLOCK, head_dim=16)
    pooled = write(empty, key, lengths, start=0, block=BLOCK)
    step = StepRule(1.0, 2 * 224 // BLOCK, BLOCK, PROFILE.rule, window=window)

    @jax.jit
    def sparse_and_dense(query, key, value):
        chosen = select_step(query, pooled, hads.LayerWeights.of(PROFILE, 1), lengths, step)
        sparse = attend_blocks(query, key, value, *chosen, lengths, block_size=BLOCK, window=window)
        places = lengths[:, None] - tokens + jnp.arange(tokens, dtype=jnp.int32)[None]
        slots = jnp.broadcast_to(jnp.arange(224, dtype=jnp.int32), (2, 224))
        rules = dict(positions=(places, slots), is_causal=True, local_window_size=(window - 1, 0))
        return sparse, xsake.attention(query, key, value, **rules)

    sparse, dense = sparse_and_dense(query, key, value)
    np.testing.assert_allclose(sparse, dense, rtol=1e-4, atol=1e-5)


def test_a_cache_of_other_blocks_is_refused(inputs, pooled):
    weights, lengths = hads.LayerWeights.of(PROFILE, 1), jnp.asarray(LENGTHS)
    step = StepRule(0.4, 24, BLOCK, PROFILE.rule)
    with pytest.raises(ValueError, match="a cache of 400 tokens has not the 20 blocks of 16 that are pooled"):
        step_mask(inputs[0], pooled, weights, lengths, step, slots=400)


def test_pooled_keys_follow_the_cache(inputs):
    """Block by block as a prompt is read, and then a token at a time."""
    key = inputs[1]
    whole = hads.PooledKeys.empty(batch=2, kv_heads=2, blocks=20, head_dim=16)
    whole = write(whole, key, jnp.asarray(LENGTHS), start=0, block=BLOCK)
    grown = hads.PooledKeys.empty(batch=2, kv_heads=2, blocks=20, head_dim=16)
    before = jnp.asarray(LENGTHS - 14)
    for start in (0, 160):
        grown = write(grown, key[:, start : start + 160], before, start=start, block=BLOCK)
    step = jax.jit(lambda pooled, lengths: pooled.write_last(key, lengths, block=BLOCK))
    for more in range(1, 15):
        grown = step(grown, before + more)
    for a, b in zip(grown, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_budgets_that_leave_no_choice_are_refused():
    with pytest.raises(ValueError, match=r"a budget of 0.1 for new tokens is below 0.1500, .* with 20 blocks"):
        step_count(20, 2, 0.1, PROFILE.rule)


ONE_LAYER, PROMPTS = case.ONE_LAYER, case.PROMPTS


@pytest.fixture(scope="module")
def model():
    return case.one_layer()


def test_writing_with_all_blocks_is_writing_densely(model):
    dense = generate(model, FOUR_PROMPTS, max_new_tokens=3, hads=HadsBudget(ONE_LAYER, 0.8, policy="always"))
    assert (
        generate(model, FOUR_PROMPTS, max_new_tokens=3, hads=HadsBudget(ONE_LAYER, 0.8, decode=1.0, policy="always"))
        == dense
    )


def test_a_prompt_read_densely_by_its_policy_is_written_after_sparsely(model):
    """All blocks, chosen or not, are dense attention; the keys that a dense prompt pools are those of a sparse one."""
    options = dict(max_new_tokens=3)
    ways = (
        HadsBudget(ONE_LAYER, None, decode=0.6, policy="always"),
        HadsBudget(ONE_LAYER, 1.0, decode=0.6, policy="always"),
        HadsBudget(ONE_LAYER, 0.8, decode=0.6, policy=hads.Policy(decode=0, spare=1.0, most=1.0)),
    )
    found = [generate(model, PROMPTS, **options, hads=way) for way in ways]
    assert found[0] == found[1] == found[2]
    decisions = ways[2].decisions([150, 203], chunk=None, dtype=jnp.float32)
    assert decisions["prompt"].budget is None and decisions["decode"].budget == 0.6


@pytest.mark.slow
def test_sequences_are_written_alone_as_in_a_batch(model):
    options = dict(max_new_tokens=6, hads=HadsBudget(ONE_LAYER, 0.8, decode=0.35, policy="always"))
    together = generate(model, PROMPTS, **options)
    assert [generate(model, [prompt], **options)[0] for prompt in PROMPTS] == together


@pytest.fixture(scope="module")
def read(model):
    """Prompts that are read densely: the cache, and its pooled keys by a budget of all blocks."""
    return read_prompts(model, PROMPTS, capacity=256, hads=HadsBudget(ONE_LAYER, 1.0, policy="always"))


NEW = np.random.default_rng(9).integers(512, size=(2, 8)).astype(np.int32)  # after 150 and 203 tokens: two blocks


@partial(jax.jit, static_argnums=(0, 1))
def after(graph, step, weights, tokens, cache, pooled):
    model = nnx.merge(graph, weights)
    if step is None:
        return model(tokens, cache=cache)
    return sparse_decode.forward(model, step, tokens, cache, pooled, (hads.LayerWeights.of(ONE_LAYER, 0),))


@pytest.mark.parametrize("tokens", sweep([2, 8], slow=[2]))
def test_several_tokens_at_once_are_what_one_after_the_other_are(model, read, tokens):
    """Dense, and with a budget of all blocks: logits of the tokens that follow one another without a cache."""
    graph, weights = nnx.split(model)
    whole = np.zeros((2, 256), np.int32)
    for row, (prompt, new) in zip(whole, zip(PROMPTS, NEW, strict=True), strict=True):
        row[: len(prompt) + 8] = prompt + new.tolist()
    wanted = np.asarray(jax.jit(lambda w, t: nnx.merge(graph, w)(t))(weights, whole))
    step = sparse_decode.StepRule.of(
        HadsBudget(ONE_LAYER, 1.0, decode=1.0, policy="always"), shortest=150, capacity=256, tokens=tokens
    )
    dense, *_ = after(graph, None, weights, NEW[:, :tokens], read.cache, read.pooled)
    sparse, cache, pooled = after(graph, step, weights, NEW[:, :tokens], read.cache, read.pooled)
    for row, prompt in enumerate(PROMPTS):
        expected = wanted[row, len(prompt) : len(prompt) + tokens]
        np.testing.assert_allclose(dense[row], expected, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(sparse[row], expected, rtol=1e-3, atol=1e-3)
    again = hads.PooledKeys.empty(batch=2, kv_heads=2, blocks=16, head_dim=16)
    again = write(again, cache.keys[0], cache.length, start=0, block=16)
    for a, b in zip(pooled[0], again, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_wrong_numbers_of_tokens_are_refused(model, read):
    budget = HadsBudget(ONE_LAYER, 1.0, decode=0.45, policy="always")
    with pytest.raises(ValueError, match="tokens=9 at once must be from 1 to 8"):
        sparse_decode.StepRule.of(budget, shortest=150, capacity=256, tokens=9)
    step = sparse_decode.StepRule.of(budget, shortest=150, capacity=256)
    with pytest.raises(ValueError, match="2 new tokens at once, but the step's rule is for 1"):
        after(*nnx.split(model)[:1], step, nnx.state(model), NEW[:, :2], read.cache, read.pooled)


def test_a_full_cache_is_an_error(model):
    cache = KVCache.empty(model.config, batch=1, capacity=8, dtype=jnp.float32)
    with pytest.raises(ValueError, match="the cache is full: it has room for 8 tokens, holds 5, and 4 more are given"):
        model(np.zeros((1, 4), np.int32), cache=KVCache(keys=cache.keys, values=cache.values, length=jnp.array([5])))
