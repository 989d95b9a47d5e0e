"""Baselines: scores against loops in numpy, masks against what the papers say, and every method to the block."""

from __future__ import annotations

from functools import cache

import hads_case as case
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.keep import keep_largest
from xsake.hads.study import methods, ranking, scores
from xsake.hads.study.baselines import PRIORITIES, Layer

PROFILE = case.random_profile(block=16)
LENGTH = 250
GRID = CausalGrid(LENGTH, 16)


@cache
def inputs() -> tuple[np.ndarray, np.ndarray]:
    query, key = case.random_inputs(0, LENGTH, PROFILE, batch=2)
    return 2 * query, key


def blocks_of(x: np.ndarray, b: int, h: int) -> list[np.ndarray]:
    return [x[b, at : at + 16, h].astype(np.float64) for at in range(0, LENGTH, 16)]


def against(got: jax.Array, value, rtol: float = 1e-4) -> None:
    """`value(q, k, i, j)` of one sequence's head and pair of blocks, for some of them."""
    query, key = inputs()
    got = np.asarray(got)
    assert (np.isneginf(got) | (got == 0))[..., ~GRID.causal()].all()
    for b, h in ((0, 0), (1, 3)):
        q, k = blocks_of(query, b, h), blocks_of(key, b, h // 2)
        wanted = [[value(q, k, i, j) for j in range(i + 1)] for i in range(GRID.side)]
        for i, row in enumerate(wanted):
            np.testing.assert_allclose(got[b, h, i, : i + 1], row, rtol=rtol, atol=1e-5)


@pytest.fixture(scope="module")
def scored() -> dict:
    @jax.jit
    def run(query, key):
        return {
            "mean": scores.mean_logits(query, key, GRID),
            "bound": scores.bound_logits(query, key, GRID),
            "second": scores.second_order_logits(query, key, GRID),
            "antidiagonal": scores.antidiagonal_shares(query, key, GRID, 8),
            "gap": scores.running_max_gap(query, key, GRID),
            "peaks": scores.strided_peaks(query, key, GRID, 4),
            "last": scores.last_rows(query, key, GRID, 16),
            "similar": scores.self_similarity(key, GRID),
            "bands": scores.band_shares(query, key, GRID),
        }

    return run(*inputs())


def test_pooled_scores(scored: dict):
    root = 8**-0.5
    against(scored["mean"], lambda q, k, i, j: q[i].mean(0) @ k[j].mean(0) * root)
    against(
        scored["bound"],
        lambda q, k, i, j: np.maximum(q[i].mean(0) * k[j].max(0), q[i].mean(0) * k[j].min(0)).sum() * root,
    )

    def second(q, k, i, j):
        logits = k[j] @ q[i].mean(0) * root
        return logits.mean() + logits.var() / 2

    against(scored["second"], second, rtol=1e-3)


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


def test_scores_from_logits(scored: dict):
    query, key = inputs()
    b, h = 0, 1
    logits = query[b, :, h].astype(np.float64) @ key[b, :, 0].T.astype(np.float64) * 8**-0.5
    logits[np.triu_indices(LENGTH, 1)] = -np.inf
    starts = np.arange(0, LENGTH, 16)
    peak = np.maximum.reduceat(logits, starts, 1)
    gap = np.maximum.reduceat(np.where(np.isneginf(peak), -np.inf, peak - np.maximum.accumulate(peak, 1)), starts, 0)
    np.testing.assert_allclose(scored["gap"][b, h], np.where(GRID.causal(), gap, -np.inf), rtol=1e-4, atol=1e-4)

    means = np.add.reduceat(key[b, :, 0].astype(np.float64), np.arange(0, LENGTH, 4), 0)
    means /= np.diff([*range(0, LENGTH, 4), LENGTH])[:, None]
    strided = query[b, :, h] @ means.T * 8**-0.5
    strided[np.arange(LENGTH)[:, None] < 4 * np.arange(len(means))] = -np.inf
    shares = np.add.reduceat(case.softmax(strided), np.arange(0, len(means), 4), 1)
    peaks = np.maximum.reduceat(shares, starts, 0)
    got = np.exp(np.asarray(scored["peaks"][b, h], np.float64))
    np.testing.assert_allclose(got[GRID.causal()], peaks[GRID.causal()], rtol=1e-4)

    weights = case.dense_weights(query, key)[b, h, -16:]
    columns, slashes = (np.asarray(x)[b, h] for x in scored["last"])
    np.testing.assert_allclose(columns, np.add.reduceat(weights, starts, 1).mean(0), rtol=1e-4, atol=1e-6)
    wanted = np.zeros(GRID.side)
    for t, s in np.ndindex(16, LENGTH):
        wanted[min(max(LENGTH - 16 + t - s + 8, 0) // 16, GRID.side - 1)] += weights[t, s] / 16
    np.testing.assert_allclose(slashes, wanted, rtol=1e-4, atol=1e-6)


def test_self_similarity_and_bands(scored: dict):
    _, key = inputs()
    for j, block in enumerate(blocks_of(key, 1, 1)):
        unit = block / np.linalg.norm(block, axis=1, keepdims=True)
        np.testing.assert_allclose(scored["similar"][1, 1, j], (unit @ unit.T).mean(), rtol=1e-4, atol=1e-5)
    query, _ = inputs()
    q, k = (np.stack([x.mean(0) for x in blocks_of(a, 0, h)]) for a, h in ((query, 3), (key, 1)))
    for band, pairs in zip(scored["bands"], ([0, 1], [1, 2, 3]), strict=True):
        inside = [*pairs, *(p + 4 for p in pairs)]
        rms = [np.sqrt((x**2).mean()) for x in (q[:, inside], q, k[:, inside], k)]
        temperature = np.sqrt(len(inside) / 8) * rms[0] / rms[1] * rms[2] / rms[3]
        logits = q[:, inside] @ k[:, inside].T / np.sqrt(len(inside)) / temperature
        wanted = case.softmax(np.where(GRID.causal(), logits, -np.inf))
        np.testing.assert_allclose(np.asarray(band)[0, 3], wanted, rtol=1e-3, atol=1e-6)


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


@pytest.fixture(scope="module")
def priorities() -> dict[str, np.ndarray]:
    @jax.jit
    def run(query, key, profile, number, count):
        layer = Layer(query, key, GRID, number, count, profile)
        return {name: method(layer) for name, method in PRIORITIES.items()}

    return run(*map(jnp.asarray, inputs()), PROFILE, 1, 300)


_kept = jax.jit(lambda priority, count: keep_largest(priority, GRID, count))
_kept_forced = jax.jit(lambda priority, count: keep_largest(priority, GRID, count, GRID.forced()))


@pytest.mark.parametrize("name", PRIORITIES)
def test_every_baseline_keeps_exactly_its_count(name: str, priorities: dict):
    priority = priorities[name]
    assert priority.shape == (2, 4, 16, 16) and not np.isnan(priority).any()
    for count in (190, 301, 544):
        for kept in (np.asarray(_kept(priority, count)), np.asarray(_kept_forced(priority, count))):
            assert kept.sum((1, 2, 3)).tolist() == [count, count]
            assert not kept[..., ~GRID.causal()].any()
        assert kept[..., case.forced_blocks(16)].all()


def test_fixed_patterns_are_what_they_are_called(priorities: dict):
    def kept(name: str, share: float) -> np.ndarray:
        return np.asarray(_kept(priorities[name], round(share * 4 * GRID.blocks)))[0, 0]

    distance, first = GRID.distance(), np.arange(16) == 0
    for i in range(16):
        window = np.flatnonzero(kept("sliding_window", 0.4)[i])
        assert window.tolist() == list(range(window[0], i + 1))  # the nearest, no hole
    assert kept("sink_window", 0.4)[:, 0].all() and kept("longformer", 0.4)[1:, 1].all()
    bird = kept("big_bird", 0.5)
    assert bird[(first | (distance < 3)) & GRID.causal()].all()
    assert kept("power", 0.5)[np.isin(distance, [0, 1, 2, 4, 8]) & GRID.causal()].all()
    assert kept("random", 0.4).diagonal().all()
    duo = np.asarray(_kept(priorities["duo"], round(0.7 * 4 * GRID.blocks)))[0].sum((1, 2))
    assert sorted(duo)[-1] == GRID.blocks and sorted(duo)[0] == 3 * 16 - 3


def test_ranking():
    share = jnp.array([[0.1, 0.5, 0.1, 0.3]])
    assert ranking.rank_in_row(share).tolist() == [[3, 0, 2, 1]]
    np.testing.assert_allclose(ranking.held_before(share), [[0.9, 0.0, 0.8, 0.5]], atol=1e-6)
    np.testing.assert_allclose(ranking.near_peak(jnp.log(share))[0, 1:3], [0.0, np.log(0.2)], atol=1e-6)


def test_our_own_methods_and_oracles_keep_exactly_their_count():
    own = methods.OURS | methods.ABLATIONS | methods.ORACLES
    query, key = map(jnp.asarray, inputs())

    @jax.jit
    def run(query, key, profile, number, count):
        layer = Layer(query, key, GRID, number, count, profile)
        return {name: method(layer) for name, method in own.items()}

    for name, kept in run(query, key, PROFILE, 1, 301).items():
        blocks = np.asarray(kept)
        wanted = 300 if name == "hads_group" else 301
        assert blocks.sum((1, 2, 3)).tolist() == [wanted, wanted], name
        assert name == "oracle_top_k" or blocks[..., case.forced_blocks(16)].all(), name


def test_a_method_is_a_mask_function():
    counts = np.array([300, 301], np.int32)
    query, key = map(jnp.asarray, inputs())
    method = methods.MethodMask.of("sink_window+forced", PROFILE, counts)
    mask = jax.jit(lambda m, q, k: m(1, q, k))(method, query, key)
    assert np.asarray(mask.to_blocks()).sum((1, 2, 3)).tolist() == [301, 301] and mask.is_causal
    with pytest.raises(KeyError, match="no_such"):
        methods.MethodMask.of("no_such", PROFILE, counts)(0, query, key)


def test_no_method_with_as_many_blocks_is_better_than_the_oracle_by_its_own_measure(priorities: dict):
    query, key = inputs()
    starts = range(0, LENGTH, 16)
    by_query = np.add.reduceat(case.dense_weights(query, key), starts, 3)
    square = np.add.reduceat(by_query**2, starts, 2) / GRID.sizes[:, None]
    mass = np.sqrt(square) / np.sqrt(square).sum(-1, keepdims=True)
    layer = Layer(jnp.asarray(query), jnp.asarray(key), GRID, 1, 300, PROFILE)

    def dropped(kept: np.ndarray) -> float:
        sensitivity = PROFILE.sensitivity[1]
        return sum(case.loss(mass[b], kept[b], sensitivity, PROFILE.burstiness[1]) for b in range(2))

    best = dropped(np.asarray(methods.ORACLES["oracle_gain"](layer)))
    for name, priority in priorities.items():
        assert best <= dropped(np.asarray(_kept_forced(priority, 300))) * 1.001, name
