"""HADS chunk by chunk: the blocks of one piece, exact budgets, sequences of different lengths, a model's prefill."""

from __future__ import annotations

import dataclasses
from functools import partial

import hads_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tuning_fakes
from cuda_offline import lower
from sweep import sweep
from tiny_model import run

import xsake
from xsake import BlockMask, hads, tuning_db
from xsake.hads.mask.grid import Grid
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.rule import TRAINING
from xsake.hads.selection import chunk, pooled_keys
from xsake.hads.selection.estimate import block_logits
from xsake.hads.selection.gpu import estimate
from xsake.hads.selection.pooled import pool
from xsake.hads.selection.rows import Rows
from xsake.kernels_xla_ref import oracle
from xsake.model import HadsBudget, generate
from xsake.model.generation import prefill
from xsake.model.generation.prefill import read_prompts
from xsake.testing.case import attend, check_run, make

LENGTH, SHORTER, CHUNK, BUDGET = 121, 86, 64, 0.8
PROFILE = case.random_profile()
BLOCK = PROFILE.block
TALL = dataclasses.replace(case.random_profile(block=8, block_q=16), rule=TRAINING)  # no row is exact


@partial(jax.jit, static_argnames=("start", "tall"))
def chunk_mask(query, key, pooled, counts, lengths, start, tall=False):
    profile, end = TALL if tall else PROFILE, min(start + query.shape[1], LENGTH)
    pooled = pooled.write(key[:, start:end], lengths, start=start, block=profile.block)
    weights = hads.LayerWeights.of(profile, 1)
    blocks = dict(block=profile.block, block_q=profile.block_q, rule=profile.rule)
    return hads.select_chunk(query, key, pooled, weights, counts, lengths, start=start, **blocks), pooled


def masks_of(query, key, lengths, chunk, budget=BUDGET, tall=False):
    """The masks of the chunks of a batch, one after the other."""
    profile = TALL if tall else PROFILE
    counts = hads.chunk_counts(profile, budget, lengths, chunk)
    pooled = hads.PooledKeys.empty(batch=len(query), kv_heads=2, blocks=-(-LENGTH // profile.block), head_dim=8)
    masks = []
    for number, start in enumerate(range(0, LENGTH, chunk)):
        part, here = query[:, start : start + chunk], counts[number, 1].astype(np.int32)
        mask, pooled = chunk_mask(part, key, pooled, here, np.int32(lengths), start, tall)
        masks.append(mask)
    return masks, counts[:, 1]


@pytest.fixture(scope="module")
def inputs():
    return tuple(jnp.asarray(x) for x in case.random_inputs(5, LENGTH, PROFILE, batch=2))


@pytest.mark.parametrize("tall", [False, True])
def test_one_chunk_chooses_what_select_chooses(inputs, tall):
    query, key = inputs
    (mask,), _ = masks_of(query, key, [LENGTH, SHORTER], 128, tall=tall)
    select = partial(hads.select, profile=TALL if tall else PROFILE, budget=BUDGET, layer=1, transpose=False)
    for n, length in enumerate([LENGTH, SHORTER]):
        wanted = jax.jit(select)(query[n : n + 1, :length], key[n : n + 1, :length]).to_blocks()
        rows, columns = wanted.shape[2:]
        found = np.asarray(mask.to_blocks())[n : n + 1]
        np.testing.assert_array_equal(found[..., :rows, :columns], wanted)
        assert found.sum() == wanted.sum()
    assert mask.is_causal


@pytest.mark.parametrize("lengths", [[LENGTH, LENGTH], [LENGTH, SHORTER]])
def test_budgets_are_exact_in_every_chunk_and_over_the_prompt(inputs, lengths):
    masks, counts = masks_of(*inputs, lengths, CHUNK)
    kept = np.stack([np.asarray(mask.to_blocks()).sum((1, 2, 3)) for mask in masks])
    np.testing.assert_array_equal(kept, counts)
    wanted = [hads.layer_counts(PROFILE, BUDGET, length)[1] for length in lengths]
    assert kept.sum(0).tolist() == wanted


def test_a_chunk_keeps_what_is_forced_and_nothing_of_the_future(inputs):
    masks, _ = masks_of(*inputs, [LENGTH, SHORTER], CHUNK)
    blocks = np.concatenate([np.pad(m.to_blocks(), ((0, 0),) * 3 + ((0, 8 - m.num_kv_blocks),)) for m in masks], 2)
    for row, length in zip(blocks, [LENGTH, SHORTER], strict=True):
        side = -(-length // BLOCK)
        forced = PROFILE.grid(length).forced()
        assert row[:, :side, :side][:, forced].all()
        assert not row[:, ~np.tri(8, dtype=bool)].any() and not row[:, side:].any()


def test_a_sequence_alone_or_in_a_batch_gets_the_same_blocks(inputs):
    query, key = inputs
    together, _ = masks_of(query, key, [LENGTH, SHORTER], CHUNK)
    noise = 100 * jnp.ones((1, LENGTH - SHORTER, 1, 1))  # what lies past the end must not matter
    query, key = query.at[1:, SHORTER:].add(noise), key.at[1:, SHORTER:].add(noise)
    other, _ = masks_of(query[::-1], key[::-1], [SHORTER, LENGTH], CHUNK)
    for a, b in zip(together, other, strict=True):
        np.testing.assert_array_equal(a.to_blocks(), np.asarray(b.to_blocks())[::-1])


def test_full_blocks_of_a_chunk_are_known(inputs):
    """Blocks wholly before the diagonal need no test of their elements, and the rule is causality from `start`."""
    query, key = inputs
    masks, _ = masks_of(query, key, [LENGTH, LENGTH], CHUNK)
    mask = masks[1]
    assert mask.band == (None, CHUNK) and mask.grid.num_allowed == 5 + 6 + 7 + 8
    below, whole = np.arange(8)[None] < 4 + np.arange(4)[:, None], np.arange(4)[:, None] < 3  # the last row is short
    np.testing.assert_array_equal(mask.kv_num_full, (np.asarray(mask.to_blocks()) & below & whole).sum(-1))
    part, seen = query[:, CHUNK:], key
    out = xsake.attention(part, seen, seen, mask)
    np.testing.assert_allclose(out, jax.jit(oracle.attention)(part, seen, seen, mask), rtol=2e-5, atol=2e-5)


def test_backends_take_the_rule_of_a_chunk(implementation):
    """Queries that begin in the middle of the keys, and end before the last key."""
    size = dict(q_len=96, kv_len=224, mask_window=(None, 64), block_q=32, block_kv=32)
    check_run(implementation, make(implementation, **size))


@pytest.mark.parametrize("mask", [None, (1, 4)], ids=["dense", "lists"])
def test_what_lies_past_a_chunk_changes_nothing(implementation, mask):
    """A cache may hold anything there."""
    case = make(implementation, q_len=96, kv_len=320, mask=mask, block_q=32, block_kv=32, mask_window=(None, 64))
    options = {} if mask else {"local_window_size": (None, 64)}
    end = case.query.shape[1] + 64
    garbage = case.inputs | {name: case.inputs[name].at[:, end:].set(1000) for name in ("key", "value")}
    with implementation.context():
        wanted, found = (attend(implementation, x, case.mask(), {}, **options)[0] for x in (case.inputs, garbage))
    np.testing.assert_array_equal(found, wanted)


def test_wrong_chunks_are_refused(inputs):
    query, key = inputs
    with pytest.raises(ValueError, match="chunk=40 must be a multiple of the profile's rows of 16 tokens"):
        hads.chunk_counts(PROFILE, BUDGET, [LENGTH], 40)
    pooled = hads.PooledKeys.empty(batch=2, kv_heads=2, blocks=8, head_dim=8)
    with pytest.raises(ValueError, match="up to token 144 do not fit 8 pooled blocks of 16"):
        pooled.write(key[:, :64], jnp.array([144, 144]), start=80, block=16)
    with pytest.raises(ValueError, match="start=8 must be a multiple of the block of 16 tokens"):
        chunk_mask(query[:, :64], key, pooled, np.int32([9, 9]), np.int32([99, 99]), 8)


# The model.

MODEL_PROFILE, PROMPTS = case.ONE_LAYER, case.PROMPTS
TALL_MODEL_PROFILE = case.random_profile(layers=1, head_dim=MODEL_PROFILE.head_dim, block=8, block_q=32)


@pytest.fixture(scope="module")
def model():
    return case.one_layer()


@pytest.fixture(scope="module")
def dense(model):
    return generate(model, PROMPTS, max_new_tokens=3)


EVERYTHING = {
    "dense": dict(chunk=128),
    "all blocks": dict(hads=HadsBudget(MODEL_PROFILE, 1.0, policy="always"), chunk=128),
}


@pytest.mark.parametrize("name", sweep(list(EVERYTHING), slow=["all blocks"]))
@pytest.mark.slow  # test_a_sparse_prompt_is_read_as_in_one_forward reads chunks
def test_chunks_of_everything_change_nothing(model, dense, name):
    assert generate(model, PROMPTS, max_new_tokens=3, **EVERYTHING[name]) == dense


@pytest.mark.parametrize("profile", [MODEL_PROFILE, TALL_MODEL_PROFILE], ids=["square", "tall"])
def test_a_sparse_prompt_is_read_as_in_one_forward(model, profile):
    """The last states, and the cache, padded, against the model's own forward with `HadsMask`."""
    prompt = PROMPTS[1]
    read = read_prompts(model, [prompt], capacity=256, hads=HadsBudget(profile, 0.7, policy="always"), pad_to=256)
    masks = hads.HadsMask.of(profile, 0.7, len(prompt))
    expected = run(model, np.asarray([prompt]), mask_fn=masks)[:, -1]
    np.testing.assert_allclose(model.logits(model.norm(read.last))[:, 0], expected, rtol=2e-3, atol=2e-3)
    assert read.cache.length.tolist() == [203] and read.cache.capacity == 256


def test_budgets_share_a_program_unless_attention_is_tuned_for_their_blocks(model):
    def programs(*budgets):
        before = prefill._read_block._cache_size()
        for budget in budgets:
            read_prompts(
                model, PROMPTS[1:], capacity=320, hads=HadsBudget(MODEL_PROFILE, budget, policy="always"), pad_to=256
            )
        return prefill._read_block._cache_size() - before

    with tuning_db.heuristics_only():
        assert programs(0.7, 0.9) == 1
    block = MODEL_PROFILE.block
    mine = tuning_db.Database("cpu", [tuning_fakes.entry(1, block_q=block, block_kv=block)])
    with tuning_db.overlay(mine):
        assert programs(0.7, 0.9) == 2


def test_weights_that_change_between_prompts_are_seen(model):
    def last():
        return read_prompts(
            model, PROMPTS[1:], capacity=256, hads=HadsBudget(MODEL_PROFILE, 0.7, policy="always"), pad_to=256
        ).last

    before, scale = last(), model.blocks[0].mlp_norm.scale
    scale[...] *= 2
    after = last()
    scale[...] /= 2
    assert not jnp.array_equal(before, after) and jnp.array_equal(before, last())


@pytest.fixture(scope="module")
def windowed():
    return case.one_layer(window=40)


@pytest.mark.slow  # compiles for each chunk, with and without a window
def test_windows_hold_across_chunks(windowed):
    assert generate(windowed, PROMPTS, max_new_tokens=2, chunk=64) == generate(windowed, PROMPTS, max_new_tokens=2)


def test_windows_need_a_profile_that_knows_them(windowed):
    with pytest.raises(
        ValueError, match="has a window of 40 tokens, and the profile of 'random' was made for no window"
    ):
        generate(windowed, PROMPTS, max_new_tokens=2, hads=HadsBudget(MODEL_PROFILE, 0.7, policy="always"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(chunk=100), "chunk=100 must be a multiple of 64 tokens"),
        (
            dict(chunk=40, hads=HadsBudget(MODEL_PROFILE, 0.7, policy="always")),
            "chunk=40 must be a multiple of the profile's rows of 16",
        ),
        (
            dict(hads=HadsBudget(PROFILE, 0.7, policy="always")),
            r"the profile of 'random' is for .*=\(2, 4, 2, 8\); this model has \(1, 4, 2, 16\)",
        ),
        (dict(chunk=64, mask_fn=lambda *_: None), "give it without hads and chunk"),
    ],
)
def test_wrong_readings_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, PROMPTS, max_new_tokens=2, **options)


def test_a_prompt_beyond_the_cache_is_refused(model):
    with pytest.raises(ValueError, match="a prompt of 203 tokens does not fit a cache of 128"):
        read_prompts(model, PROMPTS, capacity=128)
    with pytest.raises(ValueError, match="pad_to=512 is beyond the cache of 256 tokens"):
        read_prompts(model, PROMPTS, capacity=256, pad_to=512)


@pytest.mark.parametrize("first", sweep([0, 8], slow=[0]))
def test_the_kernels_of_the_estimate_are_xlas(first):
    """Sequences of different lengths; the kernels multiply in 16 bits, and read nothing past the chunk."""
    profile, lengths = case.random_profile(head_dim=16), jnp.array([300, 250], jnp.int32)
    grid, start = CausalGrid(300, 16, profile.rule), 16 * first
    query, key = (jnp.asarray(x) for x in case.random_inputs(5, 300, profile, batch=2))
    cache = jnp.pad(key, ((0, 0), (0, 100), (0, 0), (0, 0)), constant_values=jnp.nan)
    before = hads.PooledKeys.empty(batch=2, kv_heads=2, blocks=grid.columns, head_dim=16)
    if first:
        before = jax.jit(partial(before.write, start=0, block=16))(key[:, :start], lengths)

    def given(by):
        pooled = hads.PooledKeys(by(grid, first, before.features, key[:, start:], lengths))
        return chunk._Given(query[:, start:], cache, pooled, hads.LayerWeights.of(profile, 1), lengths, lengths)

    xlas = jax.jit(partial(given, pooled_keys._pool_by_xla))()
    rows = Rows(grid, first, lengths)

    @jax.jit
    def logits(given):
        known = given.pooled.parts(grid.columns)
        pooled = pool(given.query, given.key, grid, first=first, lengths=lengths, known=known)
        return block_logits(pooled, given.weights.estimator, rows)

    wanted = logits(xlas)
    with xsake.interpret():
        ours = jax.jit(partial(given, pooled_keys._pool_by_kernel))()
        inputs = ours.query, ours.key, ours.weights.estimator
        found = jax.jit(partial(estimate.block_logits, rows=rows))(*inputs, k_features=ours.pooled.features)
    np.testing.assert_allclose(ours.pooled.features, xlas.pooled.features, rtol=1e-5, atol=1e-5)
    holds = np.arange(grid.columns) * 16 < np.asarray(lengths)[:, None]
    used = grid.causal()[first:] & holds[:, None, first:, None]
    found = found[:, :, : grid.columns - first, : grid.columns]
    np.testing.assert_allclose(np.where(used, found, 0), np.where(used, wanted, 0), atol=0.02)


def test_the_kernels_of_a_chunk_lower_for_cuda():
    shape, length = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16), 8192
    profile, number = case.random_profile(q_heads=12, head_dim=128, block=64), jax.ShapeDtypeStruct((1,), jnp.int32)
    pooled = hads.PooledKeys(shape((1, 2, 512, 5, 128), dtype=jnp.float32))
    given = shape((1, 4096, 12, 128)), shape((1, 32768, 2, 128)), pooled, hads.LayerWeights.of(profile, 0)
    mask = Grid.of(64, 64, 4096, 32768, False, (None, length - 4096))
    run = partial(chunk._by_kernels, CausalGrid(length, 64, profile.rule), mask, 64)
    answers = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    text = lower(run, chunk._Given(*given, number, number, answers), chip="sm_90")
    for name in {*case.KERNELS} - {"pool_keys"}:
        assert f"hads_{name}" in text


@pytest.mark.gpu
@pytest.mark.parametrize("start", [0, 4096])
def test_a_chunk_on_a_gpu_is_xlas(start):
    profile, lengths = case.random_profile(q_heads=8, kv_heads=2, head_dim=128, block=64), np.int32([8192, 6000])
    query, key = (jnp.asarray(x, jnp.bfloat16) for x in case.random_inputs(5, 8192, profile, batch=2))
    counts = hads.chunk_counts(profile, 0.3, lengths.tolist(), 4096)[start // 4096, 1].astype(np.int32)
    empty = hads.PooledKeys.empty(batch=2, kv_heads=2, blocks=128, head_dim=128)
    pooled = jax.jit(partial(empty.write, start=0, block=64))(key, lengths)
    weights, options = hads.LayerWeights.of(profile, 1), dict(start=start, block=64, rule=profile.rule)
    given = query[:, start : start + 4096], key, pooled, weights, jnp.asarray(counts), jnp.asarray(lengths)
    mask = jax.jit(partial(hads.select_chunk, **options))(*given)
    grid = CausalGrid(start + 4096, 64, profile.rule)
    wanted = jax.jit(lambda x: BlockMask.of_finished(chunk._by_xla(grid, mask.grid, start // 64, x), **vars(mask.grid)))
    found, wanted = np.asarray(mask.to_blocks()), np.asarray(wanted(chunk._Given(*given)).to_blocks())
    np.testing.assert_array_equal(found.sum((1, 2, 3)), counts)
    assert (found & wanted).sum() > 0.99 * wanted.sum()
