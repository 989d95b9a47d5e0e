"""The methods that come with xsake: scores against loops in numpy, exact numbers of blocks, and the registry."""

from __future__ import annotations

import dataclasses
from functools import cache

import hads_case as case
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.rule import VERSION_3
from xsake.hads.selection.keep import keep_largest
from xsake.hads.study.methods import ranking, registry, scores, shipped
from xsake.hads.study.methods.layer import Layer
from xsake.hads.study.methods.mask import MethodMask
from xsake.hads.study.methods.registry import Method, register, register_rival
from xsake.hads.study.methods.shipped import expand

PROFILE = case.random_profile(block=16)
LENGTH = 250
GRID = CausalGrid(LENGTH, 16)


@cache
def inputs() -> tuple[np.ndarray, np.ndarray]:
    query, key = case.random_inputs(0, LENGTH, PROFILE, batch=2)
    return 2 * query, key


@pytest.fixture(scope="module")
def scored() -> dict:
    @jax.jit
    def run(query, key):
        return {
            "mean": scores.mean_logits(query, key, GRID),
            "antidiagonal": scores.antidiagonal_shares(query, key, GRID, 8),
            "peaks": scores.strided_peaks(query, key, GRID, 4),
        }

    return run(*inputs())


def test_mean_logits(scored: dict):
    def product(q, k, i, j):
        return q[i].mean(0) @ k[j].mean(0) * 8**-0.5

    case.check_scores(scored["mean"], product, *inputs(), GRID, rtol=1e-4)


def test_antidiagonals_meet_every_query_and_key_of_a_stride(scored: dict):
    query, key = inputs()
    b, h = 1, 2
    q, k = np.zeros((2, 256, 8))
    q[:LENGTH], k[:LENGTH] = query[b, :, h], key[b, :, 1]
    logits = np.full((32, 32), -np.inf)
    for i, j in np.ndindex(32, 32):
        if j <= i:
            logits[i, j] = sum(q[8 * i + 7 - s] @ k[8 * j + s] for s in range(8)) * 8**-0.5 / 8
    shares = case.softmax(logits).reshape(16, 2, 16, 2).sum((1, 3))
    wanted = shares / shares.sum(-1, keepdims=True)
    np.testing.assert_allclose(scored["antidiagonal"][b, h], wanted, rtol=1e-4, atol=1e-6)


def test_strided_peaks(scored: dict):
    query, key = inputs()
    b, h = 0, 1
    starts = np.arange(0, LENGTH, 16)
    means = np.add.reduceat(key[b, :, 0].astype(np.float64), np.arange(0, LENGTH, 4), 0)
    means /= np.diff([*range(0, LENGTH, 4), LENGTH])[:, None]
    strided = query[b, :, h] @ means.T * 8**-0.5
    strided[np.arange(LENGTH)[:, None] < 4 * np.arange(len(means))] = -np.inf
    shares = np.add.reduceat(case.softmax(strided), np.arange(0, len(means), 4), 1)
    peaks = np.maximum.reduceat(shares, starts, 0)
    got = np.exp(np.asarray(scored["peaks"][b, h], np.float64))
    np.testing.assert_allclose(got[GRID.causal()], peaks[GRID.causal()], rtol=1e-4)


def test_a_stride_divides_the_block():
    query, key = map(jnp.asarray, inputs())
    for score in (scores.antidiagonal_shares, scores.strided_peaks):
        with pytest.raises(ValueError, match="stride=16 must divide the block of 8"):
            score(query, key, CausalGrid(LENGTH, 8), 16)


_keep = jax.jit(lambda priority, count: keep_largest(priority, CausalGrid(160, 16), count))


@given(st.integers(0, 2**32 - 1), st.integers(1, 110), st.booleans())
def test_keep_largest_is_a_sort_with_ties_to_later_rows(seed: int, count: int, few_values: bool):
    rng = np.random.default_rng(seed)
    priority = rng.standard_normal((1, 2, 10, 10)).astype(np.float32)
    if few_values:
        priority = np.round(priority)
    kept = np.asarray(_keep(priority, count))[0]
    causal = np.tril(np.ones((10, 10), bool))
    assert kept.sum() == count and not kept[:, ~causal].any()
    places = [at for at in np.ndindex(2, 10, 10) if causal[at[1:]]]
    if few_values:
        rows = sorted(places, key=lambda at: (-priority[0][at], -at[0] * 10 - at[1], -at[2]))[:count]
        assert {at for at in places if kept[at]} == set(rows)
    else:
        least, most = priority[0][kept].min(), max((priority[0][at] for at in places if not kept[at]), default=-np.inf)
        assert least >= most - 2e-3 * abs(most)


def test_ranking():
    share = jnp.array([[0.1, 0.5, 0.1, 0.3]])
    assert ranking.rank_in_row(share).tolist() == [[3, 0, 2, 1]]
    np.testing.assert_allclose(ranking.held_before(share), [[0.9, 0.0, 0.8, 0.5]], atol=1e-6)
    np.testing.assert_allclose(ranking.near_peak(jnp.log(share))[0, 1:3], [0.0, np.log(0.2)], atol=1e-6)


@pytest.fixture(scope="module")
def kept() -> dict[str, np.ndarray]:
    """The blocks of every method that is not made from priorities, at 301 blocks."""
    names = ("hads", "hads_group", "oracle_top_k", "oracle_top_k+forced", "oracle_top_p+forced", "oracle_gain")

    @jax.jit
    def run(masks, query, key):
        return {name: mask.blocks(1, query, key) for name, mask in masks.items()}

    masks = {name: MethodMask.of(name, PROFILE, [300, 301]) for name in names}
    return jax.device_get(run(masks, *map(jnp.asarray, inputs())))


def test_methods_promote_no_ranks():
    query, key = inputs()
    with jax.numpy_rank_promotion("raise"):
        for name in (*expand("ours"), *(rival.__name__ for rival in shipped.RIVALS), *expand("oracles")):
            jax.eval_shape(lambda m, q, k: m.blocks(1, q, k), MethodMask.of(name, PROFILE, [300, 301]), query, key)


def test_our_own_methods_and_oracles_keep_exactly_their_count(kept: dict):
    for name, blocks in kept.items():
        wanted = 300 if name == "hads_group" else 301
        assert blocks.sum((1, 2, 3)).tolist() == [wanted, wanted], name
        assert name == "oracle_top_k" or blocks[..., case.forced_blocks(16)].all(), name
    assert np.array_equal(kept["hads_group"][:, ::2], kept["hads_group"][:, 1::2])  # one mask per KV head


def test_a_method_is_a_mask_function():
    query, key = map(jnp.asarray, inputs())
    method = MethodMask.of("sink_window+forced", PROFILE, np.array([300, 301], np.int32))
    mask = jax.jit(lambda m, q, k: m(1, q, k))(method, query, key)
    assert np.asarray(mask.to_blocks()).sum((1, 2, 3)).tolist() == [301, 301] and mask.is_causal
    with pytest.raises(KeyError, match="no_such"):
        MethodMask.of("no_such", PROFILE, [300, 301])


def test_the_weight_of_the_last_rows_for_every_method_or_for_none():
    rival = "mean_top_k+forced"
    cases = (("hads", "own"), ("hads", "none"), (rival, "own"), (rival, "every"))
    masks = {of: MethodMask.of(of[0], PROFILE, [300, 301], last_rows=of[1]) for of in cases}
    run = jax.jit(lambda masks, q, k: {of: mask.blocks(1, q, k) for of, mask in masks.items()})
    kept = jax.device_get(run(masks, *map(jnp.asarray, inputs())))
    assert all(blocks.sum((1, 2, 3)).tolist() == [301, 301] for blocks in kept.values())
    assert kept[rival, "every"][..., case.forced_blocks(16)].all()
    last = {of: blocks[..., -2:, :].sum((1, 2, 3)) for of, blocks in kept.items()}
    assert (last[rival, "every"] == last["hads", "own"]).all() and (last[rival, "own"] != last["hads", "own"]).any()
    assert last["hads", "none"].sum() < last["hads", "own"].sum()
    with pytest.raises(ValueError, match="last_rows='all' must be one of own, every, none"):
        MethodMask.of("hads", PROFILE, [300, 301], last_rows="all")


def test_a_rival_is_given_the_last_rows_of_hads():
    """As many blocks as HADS keeps there, by exact masses."""
    query, key = map(jnp.asarray, inputs())
    counts = np.array([300, 301], np.int32)
    run = jax.jit(lambda masks: {name: mask.blocks(1, query, key) for name, mask in masks.items()})
    names = ("hads", "mean_top_k+forced", "mean_top_k+exact")
    kept = jax.device_get(run({name: MethodMask.of(name, PROFILE, counts) for name in names}))
    ours, forced, exact = (kept[name] for name in names)
    assert exact.sum((1, 2, 3)).tolist() == [301, 301] and exact[..., case.forced_blocks(16)].all()
    last = PROFILE.grid(LENGTH).last_rows()
    assert (exact[:, :, last].sum((1, 2, 3)) == ours[:, :, last].sum((1, 2, 3))).all()
    assert (forced[:, :, last] & ours[:, :, last]).sum() < (exact[:, :, last] & ours[:, :, last]).sum()
    older = dataclasses.replace(PROFILE, rule=VERSION_3)
    with pytest.raises(ValueError, match=r"Rule\.exact_queries, of which this profile's rule has none"):
        MethodMask.of("mean_top_k+exact", older, counts).blocks(1, query, key)


@pytest.fixture
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "METHODS", {})
    monkeypatch.setattr(registry, "GROUPS", {})


@pytest.mark.usefixtures("empty_registry")
def test_a_rival_is_registered_with_and_without_forced_blocks():
    register_rival("nearest", lambda layer: layer.everywhere(-layer.grid.distance()))
    assert registry.GROUPS == {"rivals": ["nearest"], "forced": ["nearest+forced"], "exact": ["nearest+exact"]}
    plain, forced = registry.METHODS["nearest"], registry.METHODS["nearest+forced"]
    assert plain.program is forced.program and not plain.forced and forced.forced  # one compiled program for both
    run = jax.jit(lambda q, k, forced: plain.program(Layer(q, k, GRID, 1, 400, PROFILE, with_forced=forced)))
    blocks = run(*inputs(), False)
    assert blocks.sum((1, 2, 3)).tolist() == [400, 400] and not blocks[..., 8:, 0].any()
    assert run(*inputs(), True)[..., 0].all()


@pytest.mark.usefixtures("empty_registry")
def test_names_are_registered_once():
    method = Method(lambda layer: layer.forced)
    register("mine", method, group="new")
    for name, why in (
        ("mine", "registered already"),
        ("new", "registered already"),
        ("a,b", "no comma"),
        ("", "comma"),
    ):
        with pytest.raises(ValueError, match=why):
            register(name, method, group="new")
    assert registry.GROUPS == {"new": ["mine"]}


def test_groups():
    assert expand("oracles, hads")[-1] == "hads" and "oracle_gain" in expand("oracles")
    assert expand("short") == shipped.GROUPS["short"] and set(shipped.GROUPS["short"]) <= set(shipped.METHODS)
    with pytest.raises(ValueError, match=r"unknown \['odd'\]; groups are short, ours, rivals, .*; methods are hads, "):
        expand("hads,odd")
    with pytest.raises(ValueError, match="no method is named; groups are short"):
        expand(" , ")
