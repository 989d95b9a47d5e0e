"""The estimate, the rule and the exact number of blocks, against dense numpy and brute force."""

from __future__ import annotations

import itertools
from functools import partial

import hads_case as case
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from sweep import sweep

import xsake
from xsake import hads
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.estimator import BUCKETS, bucket_of
from xsake.hads.selection.choice import choose
from xsake.hads.selection.estimate import layer_mass
from xsake.hads.selection.keep import nonnegative_order, row_counts
from xsake.hads.selection.rows import Rows

TALL = case.random_profile(block=8, block_q=32)


MASSES = [(96, False), (89, False), (89, True)]  # length, tall rows


@pytest.mark.parametrize("of", sweep(MASSES, slow=[(96, False)]), ids=str)
def test_masses_are_sums_of_features_and_exact_in_the_last_rows(of: tuple[int, bool]):
    length, tall = of
    profile = TALL if tall else case.random_profile()
    query, key = case.random_inputs(3, length, profile, batch=2)
    grid = profile.grid(length)
    got = jax.jit(lambda query, key: layer_mass(query, key, profile.estimator(1), Rows(grid)))(query, key)
    np.testing.assert_allclose(got, case.dense_mass(query, key, profile, 1), rtol=1e-3, atol=1e-6)


def test_distances_share_buckets_that_double_every_other_step():
    assert BUCKETS[:10].tolist() == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert bucket_of(np.array([-3, 0, 1, 5, 6, 7, 8, 10**6])).tolist() == [0, 0, 1, 4, 5, 5, 6, len(BUCKETS) - 1]


@given(st.integers(0, 2**32 - 1), st.integers(0, 60), st.booleans())
def test_row_counts_are_those_of_a_stable_sort(seed: int, count: int, few_values: bool):
    rng = np.random.default_rng(seed)
    gain = rng.random((2, 10, 8)).astype(np.float32)
    if few_values:
        gain = np.round(gain * 3) / 3  # ties
    gain[:, rng.random((10, 8)) < 0.2] = -1.0
    gain[:, 0, 0] = np.inf
    gain.sort(-1)
    count = min(count, int((gain >= 0).sum((1, 2)).min()))
    got = np.asarray(_row_counts(gain, np.int32(count)))
    for g, rows in zip(gain, got, strict=True):
        order = sorted(np.ndindex(10, 8), key=lambda at: (-g[at], -at[0]))[:count]
        assert rows.tolist() == np.bincount([at[0] for at in order], minlength=10).tolist()


def masses(seed: int, heads: int, n: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).exponential(size=(1, heads, n, n)) ** 3 * np.tri(n)
    return (drawn / drawn.sum(-1, keepdims=True)).astype(np.float32)


@jax.jit
def _choose(mass, sensitivity, burstiness, count):
    grid = CausalGrid(16 * mass.shape[-1], 16)
    return choose(mass, Rows(grid), sensitivity=sensitivity, burstiness=burstiness, count=count)


_row_counts = jax.jit(lambda gain, count: row_counts(nonnegative_order(gain), count))
_select = jax.jit(hads.select, static_argnames=("layer", "mode", "per"))


@given(st.integers(0, 2**32 - 1), st.integers(0, 6), st.sampled_from([0.0, 0.1]))
def test_no_other_choice_of_as_many_blocks_is_better(seed: int, extra: int, spread: float):
    """Every subset is tried: 5 rows of blocks have 2 that are not forced, times 3 heads."""
    grid = CausalGrid(5 * 16, 16)
    mass = masses(seed, 3, 5)
    sensitivity = np.random.default_rng(seed).exponential(size=3).astype(np.float32)
    burstiness = np.full(3, spread, np.float32)
    count = 3 * grid.forced_blocks + extra
    kept = np.asarray(_choose(mass, sensitivity, burstiness, count))[0]
    assert kept.sum() == count and kept[:, case.forced_blocks(5)].all()
    free = [at for at in np.ndindex(3, 5, 5) if at[2] <= at[1] and not case.forced_blocks(5)[at[1:]]]
    best = np.inf
    for chosen in itertools.combinations(free, extra):
        other = np.broadcast_to(case.forced_blocks(5), (3, 5, 5)).copy()
        for at in chosen:
            other[at] = True
        best = min(best, case.loss(mass[0], other, sensitivity, burstiness))
    assert case.loss(mass[0], kept, sensitivity, burstiness) <= best * 1.001 + 1e-6


def test_counts_for_each_head_and_thresholds():
    grid = CausalGrid(20 * 16, 16)
    mass = jnp.asarray(masses(5, 3, 20))
    rule = dict(sensitivity=np.ones(3, np.float32), burstiness=np.zeros(3, np.float32))
    counts = np.array([70, 100, 210], np.int32)
    assert jax.jit(lambda x: choose(x, Rows(grid), count=counts, **rule))(mass).sum((-2, -1)).tolist() == [
        counts.tolist()
    ]
    kept = np.asarray(jax.jit(lambda x: choose(x, Rows(grid), threshold=1e-3, **rule))(mass))
    for h, i in np.ndindex(3, 20):
        row = np.asarray(mass)[0, h, i]
        order = sorted(range(i + 1), key=lambda j, i=i, row=row: (not case.forced_blocks(20)[i, j], -row[j]))
        dropped = 1.0
        for j in order:
            gain = row[j] * (2 * dropped - row[j]) * (16 if i >= 12 else 1)  # the last 128 tokens
            dropped -= row[j]
            if abs(gain - 1e-3) > 1e-5:
                assert kept[0, h, i, j] == (case.forced_blocks(20)[i, j] or gain >= 1e-3)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(256, "query_head", 0), (500, "kv_head", 1)]),
    st.floats(0.4, 1.0),
)
def test_density_is_exact_on_every_input(seed: int, shape: tuple[int, str, int], budget: float):
    """Also for more tokens than the 256 of calibration."""
    length, per, layer = shape
    profile = case.random_profile()
    query, key = case.random_inputs(seed, length, profile, batch=2)
    heads = profile.q_heads if per == "query_head" else profile.kv_heads
    wanted = hads.layer_counts(profile, budget, length, heads=heads)
    n = -(-length // profile.block)
    assert abs(wanted.sum() - budget * profile.layers * heads * n * (n + 1) / 2) <= 0.5
    mask = _select(query, key, profile, wanted.astype(np.int32), layer=layer, per=per)
    assert (mask.heads, mask.is_causal) == (heads, True)
    blocks = np.asarray(mask.to_blocks())
    assert blocks.sum((1, 2, 3)).tolist() == [wanted[layer]] * 2
    assert blocks[:, :, case.forced_blocks(n)].all()


@pytest.mark.parametrize("tall", [False, True])
def test_select_is_the_rule_on_the_estimate_and_traced_counts_choose_the_same(tall: bool):
    profile = TALL if tall else case.random_profile()
    query, key = map(jnp.asarray, case.random_inputs(7, 250, profile))
    grid = profile.grid(250)
    counts = hads.layer_counts(profile, 0.5, 250)
    mass = jnp.asarray(case.dense_mass(np.asarray(query), np.asarray(key), profile, 1), jnp.float32)
    rule = dict(sensitivity=profile.sensitivity[1], burstiness=profile.burstiness[1])
    wanted = np.asarray(jax.jit(lambda mass: choose(mass, Rows(grid), count=int(counts[1]), **rule))(mass))
    eager = hads.select(query, key, profile, 0.5, layer=1)
    run = jax.jit(lambda q, k, p, c: hads.select(q, k, p, c, layer=1))
    traced = run(query, key, profile, jnp.asarray(counts, jnp.int32))
    for mask in (eager, traced):
        assert (mask.block_q, mask.block_kv) == (profile.block_q, profile.block)
        differs = (np.asarray(mask.to_blocks()) != wanted).sum()
        assert differs <= 2  # a tie within rounding may fall either way
    assert traced.capacity == grid.blocks and not traced.overflowed().any()


@pytest.mark.parametrize("budget", [0.7, 1.0])
def test_counts_are_exact_where_a_token_is_nan(budget: float):
    profile = case.random_profile()
    query, key = case.random_inputs(7, 250, profile, batch=2)
    whole = hads.select(query, key, profile, budget, layer=1).to_blocks()
    query[1, 70] = np.nan
    blocks = np.asarray(hads.select(query, key, profile, budget, layer=1).to_blocks())
    assert blocks.sum((1, 2, 3)).tolist() == 2 * [int(hads.layer_counts(profile, budget, 250)[1])]
    assert (blocks[0] == whole[0]).all() and blocks[:, :, case.forced_blocks(16)].all()


def test_modes():
    profile = case.random_profile()
    query, key = case.random_inputs(8, 256, profile)
    static = hads.select(query, key, profile, 0.5, layer=0, mode="static")
    counts = hads.head_counts(profile, 0.5, 256)
    assert np.asarray(static.to_blocks()).sum((0, 2, 3)).tolist() == counts[0].tolist()
    assert counts.sum() == hads.layer_counts(profile, 0.5, 256).sum()
    fewer, more = (hads.select(query, key, profile, b, layer=0, mode="elastic").density() for b in (0.4, 0.9))
    assert fewer < more
    assert hads.select(query, key, profile, 1.0, layer=0, mode="elastic").density() == 1


def test_new_inputs_profiles_and_counts_do_not_retrace():
    """The program is one of test_density_is_exact_on_every_input."""
    programs = []
    for seed, budget in ((0, 0.5), (1, 0.6)):
        profile = case.random_profile(seed)
        counts = hads.layer_counts(profile, budget, 256).astype(np.int32)
        inputs = case.random_inputs(seed, 256, profile, batch=2)
        mask = _select(*inputs, profile, counts, layer=0, per="query_head")
        assert np.asarray(mask.to_blocks()).sum((1, 2, 3)).tolist() == [counts[0]] * 2
        programs.append(_select._cache_size())
    assert programs[0] == programs[1]


@pytest.mark.slow
def test_gradients_flow_through_attention_and_take_the_mask_as_constant():
    profile = case.random_profile()
    query, key = map(jnp.asarray, case.random_inputs(9, 128, profile))
    value = jnp.sin(key)
    fixed = hads.select(query, key, profile, 0.8, layer=0)

    def loss(query, mask=None):
        mask = hads.select(query, key, profile, 0.8, layer=0) if mask is None else mask
        return jnp.square(xsake.attention(query, key, value, mask)).sum()

    inside, outside = jax.jit(jax.grad(loss))(query), jax.grad(loss)(query, fixed)
    assert jnp.abs(outside).max() > 0
    np.testing.assert_allclose(inside, outside, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("unchecked_annotations")
def test_wrong_calls():
    profile = case.random_profile()
    query, key = case.random_inputs(11, 256, profile)

    def refused(why: str, query=query, key=key, budget=0.5, layer=0, **options) -> None:
        with pytest.raises(ValueError, match=why):
            hads.select(query, key, profile, budget, layer=layer, **options)

    refused(r"below 0\.3382, the share of the blocks that are always on at 256 tokens", budget=0.1)
    for budget in (0.0, -0.2, 1.5, float("nan"), True):
        refused("must be a share of the causal blocks", budget=budget)
    refused(r"profile of 'random' is for .*=\(4, 2, 8\).* have \(4, 4, 8\): calibrate", key=query)
    refused("layer=2 must be an int from 0 to 1", layer=2)
    refused("64 queries and 256 keys", query=query[:, :64])
    refused("mode='exakt' must be", mode="exakt")
    refused("per='head' must be", per="head")
    refused("capacity=0 must be at least 1", capacity=0)
    refused("is calibrated for query heads", per="kv_head", mode="static")
    refused(r"integers of shape \(2,\); got int32\(3,\)", budget=np.zeros(3, np.int32))
    refused("takes its budget as a float", budget=np.zeros(2, np.int32), mode="elastic")


LISTS = [(96, None), (96, 12), (89, None), (89, 12)]  # length, capacity


@pytest.mark.parametrize("of", sweep(LISTS, slow=[(96, None), (96, 12), (89, None)]), ids=str)
def test_lists_for_inference_are_those_for_training(of: tuple[int, int | None]):
    length, capacity = of
    profile = case.random_profile()
    query, key = case.random_inputs(3, length, profile)

    def rows(transpose: bool) -> xsake.BlockMask:
        chosen = partial(hads.select, profile=profile, budget=0.8, layer=1, capacity=capacity, transpose=transpose)
        return jax.jit(chosen)(query, key)

    ours, wanted = rows(False), rows(True)
    assert not ours.has_transpose and ours.complete == wanted.complete == (capacity is None)
    for name in ("kv_indices", "kv_row_ptr", "kv_num_full", "row_order", "density_hint"):
        assert np.array_equal(getattr(ours, name), getattr(wanted, name)), name
