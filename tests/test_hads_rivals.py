"""Rivals: scores against loops in numpy, masks against the papers, and the exact number of blocks of every method.

They are of the benchmarks, not of the package: most of these tests run in `make slow`.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from pathlib import Path

import hads_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.hads import ablations, patterns, rivals, scores, v1, x_heads
from benchmarks.hads.methods import ABLATIONS, METHODS, RIVALS, STRENGTHENED
from xsake.hads.calibration.block_statistics import block_statistics
from xsake.hads.calibration.layerwise import Layers
from xsake.hads.calibration.observe import Touched
from xsake.hads.calibration.sensitivity import cost_of_dropping
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.estimator import BUCKETS
from xsake.hads.selection import pooled
from xsake.hads.selection.keep import keep_largest
from xsake.hads.study.layerwise import attend, project
from xsake.hads.study.methods import shipped
from xsake.hads.study.methods.layer import Layer
from xsake.hads.study.methods.mask import MethodMask
from xsake.hads.study.methods.scores import antidiagonal_shares, strided_peaks

PROFILE = case.random_profile(block=16)
LENGTH = 250
GRID = CausalGrid(LENGTH, 16)
_RIVALS = {rival.__name__: rival for rival in (*shipped.RIVALS, *patterns.PATTERNS, *rivals.METHODS, *x_heads.METHODS)}
PRIORITIES = _RIVALS | {own.__name__: own for own in (*ablations.BY_PRIORITY, *v1.METHODS)}


@cache
def inputs() -> tuple[np.ndarray, np.ndarray]:
    query, key = case.random_inputs(0, LENGTH, PROFILE, batch=2)
    return 2 * query, key


@cache
def v1_profile() -> v1.V1Profile:
    rng = np.random.default_rng(3)
    entropy, mass = rng.random((2, 4)), rng.random((2, 4, len(BUCKETS)))
    return v1.V1Profile(entropy.astype(np.float32), mass.astype(np.float32))


def test_every_rival_is_registered_in_both_forms():
    names = {*_RIVALS, "minference", "kascade"}
    assert set(RIVALS) == names and set(STRENGTHENED) == {f"{name}+forced" for name in names}
    assert {name for name in METHODS if name.startswith("hads_v1")} == v1.NAMES
    assert {*RIVALS, *STRENGTHENED, *ABLATIONS} <= set(METHODS)


@pytest.mark.slow  # rivals are compared with plain ones elsewhere, in one part
def test_many_rows_are_taken_in_parts_that_see_fewer_keys(monkeypatch: pytest.MonkeyPatch):
    query, key = map(jnp.asarray, case.random_inputs(0, LENGTH, PROFILE))
    kept = jnp.broadcast_to(GRID.causal() & (GRID.distance() < 5), (1, query.shape[2], GRID.columns, GRID.columns))

    def everything() -> list[np.ndarray]:
        def run(query, key):
            found = [scores.running_max_gap(query, key, GRID), strided_peaks(query, key, GRID)]
            found += [*block_statistics(query, key, block=16), v1.mean_entropy(query, key, GRID)]
            return [*found, *cost_of_dropping.__wrapped__(Touched(query, key, -key, query), kept, GRID)]

        return [np.asarray(x) for x in jax.jit(run)(query, key)]

    assert pooled.row_bounds(128) == [0, 43, 85, 128] and pooled.row_bounds(16) == [0, 16]
    whole = everything()
    monkeypatch.setattr(pooled, "_ROWS_PER_PART", 3)
    assert pooled.row_bounds(16) == [0, 4, 8, 12, 16]
    for wanted, found in zip(whole, everything(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6)


@pytest.fixture(scope="module")
def scored() -> dict:
    @jax.jit
    def run(query, key):
        return {
            "bound": scores.bound_logits(query, key, GRID),
            "second": scores.second_order_logits(query, key, GRID),
            "gap": scores.running_max_gap(query, key, GRID),
            "last": scores.last_rows(query, key, GRID, 16),
            "similar": scores.self_similarity(key, GRID),
            "bands": scores.band_shares(query, key, GRID),
        }

    return run(*inputs())


@pytest.mark.slow
def test_pooled_scores(scored: dict):
    def bound(q, k, i, j):
        return np.maximum(q[i].mean(0) * k[j].max(0), q[i].mean(0) * k[j].min(0)).sum() * 8**-0.5

    def second(q, k, i, j):
        logits = k[j] @ q[i].mean(0) * 8**-0.5
        return logits.mean() + logits.var() / 2

    case.check_scores(scored["bound"], bound, *inputs(), GRID, rtol=1e-4)
    case.check_scores(scored["second"], second, *inputs(), GRID, rtol=1e-3)


@pytest.mark.slow
def test_scores_from_logits(scored: dict):
    query, key = inputs()
    b, h = 0, 1
    logits = query[b, :, h].astype(np.float64) @ key[b, :, 0].T.astype(np.float64) * 8**-0.5
    logits[np.triu_indices(LENGTH, 1)] = -np.inf
    starts = np.arange(0, LENGTH, 16)
    peak = np.maximum.reduceat(logits, starts, 1)
    gap = np.maximum.reduceat(np.where(np.isneginf(peak), -np.inf, peak - np.maximum.accumulate(peak, 1)), starts, 0)
    np.testing.assert_allclose(scored["gap"][b, h], np.where(GRID.causal(), gap, -np.inf), rtol=1e-4, atol=1e-4)

    weights = case.dense_weights(query, key)[b, h, -16:]
    columns, slashes = (np.asarray(x)[b, h] for x in scored["last"])
    np.testing.assert_allclose(columns, np.add.reduceat(weights, starts, 1).mean(0), rtol=1e-4, atol=1e-6)
    wanted = np.zeros(GRID.columns)
    for t, s in np.ndindex(16, LENGTH):
        wanted[min(max(LENGTH - 16 + t - s + 8, 0) // 16, GRID.columns - 1)] += weights[t, s] / 16
    np.testing.assert_allclose(slashes, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_self_similarity_and_bands(scored: dict):
    _, key = inputs()
    for j, block in enumerate(case.blocks_of(key, 1, 1, GRID)):
        unit = block / np.linalg.norm(block, axis=1, keepdims=True)
        np.testing.assert_allclose(scored["similar"][1, 1, j], (unit @ unit.T).mean(), rtol=1e-4, atol=1e-5)
    query, _ = inputs()
    q, k = (np.stack([x.mean(0) for x in case.blocks_of(a, 0, h, GRID)]) for a, h in ((query, 3), (key, 1)))
    for band, pairs in zip(scored["bands"], ([0, 1], [1, 2, 3]), strict=True):
        inside = [*pairs, *(p + 4 for p in pairs)]
        rms = [np.sqrt((x**2).mean()) for x in (q[:, inside], q, k[:, inside], k)]
        temperature = np.sqrt(len(inside) / 8) * rms[0] / rms[1] * rms[2] / rms[3]
        logits = q[:, inside] @ k[:, inside].T / np.sqrt(len(inside)) / temperature
        wanted = case.softmax(np.where(GRID.causal(), logits, -np.inf))
        np.testing.assert_allclose(np.asarray(band)[0, 3], wanted, rtol=1e-3, atol=1e-6)


@pytest.fixture(scope="module")
def priorities() -> dict[str, np.ndarray]:
    @jax.jit
    def run(query, key, profile, number, count):
        layer = Layer(query, key, GRID, number, count, profile, knowledge=v1_profile())
        with_thresholds = dataclasses.replace(layer, knowledge=x_heads.Thresholds(jnp.full((2, 4), 0.9)))
        return {
            name: method(with_thresholds if name in x_heads.NAMES else layer) for name, method in PRIORITIES.items()
        }

    return run(*map(jnp.asarray, inputs()), PROFILE, 1, 300)


_kept = jax.jit(lambda priority, count: keep_largest(priority, GRID, count))
_kept_forced = jax.jit(lambda priority, count: keep_largest(priority, GRID, count, GRID.forced()))


@pytest.mark.slow
@pytest.mark.parametrize("name", PRIORITIES)
def test_every_rival_keeps_exactly_its_count(name: str, priorities: dict):
    priority = priorities[name]
    assert priority.shape == (2, 4, 16, 16) and not np.isnan(priority).any()
    for count in (190, 301, 544):
        for kept in (np.asarray(_kept(priority, count)), np.asarray(_kept_forced(priority, count))):
            assert kept.sum((1, 2, 3)).tolist() == [count, count]
            assert not kept[..., ~GRID.causal()].any()
        assert kept[..., case.forced_blocks(16)].all()


def test_no_rival_leaves_a_row_without_a_key():
    names = ("blasst", "sparge")
    masks = {name: MethodMask.of(name, PROFILE, [64, 70]) for name in names}  # 4 heads with 16 rows each
    run = jax.jit(lambda masks, q, k: {name: mask.blocks(1, q, k) for name, mask in masks.items()})
    for name, blocks in jax.device_get(run(masks, *map(jnp.asarray, inputs()))).items():
        assert blocks[..., np.eye(16, dtype=bool)].all() and blocks.sum((1, 2, 3)).tolist() == [70, 70], name


def test_thresholds_of_heads(tmp_path: Path):
    query, key = inputs()
    got = np.asarray(x_heads.needed(jnp.asarray(query[:1]), jnp.asarray(key[:1]), GRID))
    starts = np.arange(0, LENGTH, 16)
    weights = case.dense_weights(query[:1], key[:1])[0]
    mass = np.add.reduceat(np.add.reduceat(weights, starts, 2), starts, 1) / GRID.sizes[:, None]
    shares = np.asarray(scores_of_x(jnp.asarray(query[:1]), jnp.asarray(key[:1]))[0], np.float64)
    wanted = []
    for h in range(4):
        rows = []
        for i in range(16):
            order = np.argsort(-mass[h, i, : i + 1])
            fewest = order[: int((np.cumsum(mass[h, i, order]) < 0.9).sum()) + 1]
            ranked = np.argsort(-shares[h, i, : i + 1])
            last = max(int(np.flatnonzero(ranked == j)[0]) for j in fewest)
            rows.append(shares[h, i, ranked[:last]].sum())
        wanted.append(np.mean(rows))
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)
    x_heads.Thresholds(got[None]).save(tmp_path / "x.npz")
    assert np.array_equal(x_heads.Thresholds.load(tmp_path / "x.npz").share, got[None])

    # At the fitted thresholds, heads keep what their thresholds say.
    layer = Layer(jnp.asarray(query[:1]), jnp.asarray(key[:1]), GRID, 0, 300, PROFILE)
    with pytest.raises(ValueError, match=r"needs knowledge=Thresholds\(...\) .*; got None"):
        x_heads.x_attention_8_heads(layer)
    layer = dataclasses.replace(layer, knowledge=x_heads.Thresholds(jnp.asarray([[0.2, 0.4, 0.6, 0.8]])))
    above = np.asarray(x_heads.x_attention_8_heads(layer))[0] > 0
    for h, share in enumerate((0.2, 0.4, 0.6, 0.8)):
        ranked = np.argsort(-shares[h, 9, :10])
        fewest = ranked[: int((np.cumsum(shares[h, 9, ranked]) <= share).sum()) + 1]
        assert set(np.flatnonzero(above[h, 9])) == {*fewest.tolist(), 0, 9}


scores_of_x = jax.jit(lambda q, k: antidiagonal_shares(q, k, GRID, 8))


@pytest.mark.slow
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


@pytest.mark.slow
def test_ablations_keep_exactly_their_count():
    @jax.jit
    def run(masks, query, key):
        return {name: mask.blocks(1, query, key) for name, mask in masks.items()}

    masks = {name: MethodMask.of(name, PROFILE, [300, 301]) for name in ablations.ABLATIONS}
    for name, blocks in jax.device_get(run(masks, *map(jnp.asarray, inputs()))).items():
        assert blocks.sum((1, 2, 3)).tolist() == [301, 301], name
        assert blocks[..., case.forced_blocks(16)].all(), name
    assert (ablations.equal_heads(PROFILE).sensitivity == 1).all()
    assert (ablations.no_burstiness(PROFILE).burstiness == 0).all()


@pytest.mark.slow
def test_no_method_with_as_many_blocks_is_better_than_the_oracle_by_its_own_measure(priorities: dict):
    query, key = inputs()
    starts = range(0, LENGTH, 16)
    by_query = np.add.reduceat(case.dense_weights(query, key), starts, 3)
    square = np.add.reduceat(by_query**2, starts, 2) / GRID.sizes[:, None]
    mass = np.sqrt(square) / np.sqrt(square).sum(-1, keepdims=True)

    def dropped(kept: np.ndarray) -> float:
        sensitivity = PROFILE.sensitivity[1]
        return sum(case.loss(mass[b], kept[b], sensitivity, PROFILE.burstiness[1]) for b in range(2))

    oracle = jax.jit(lambda mask, q, k: mask.blocks(1, q, k))(
        MethodMask.of("oracle_gain", PROFILE, [300, 300]), query, key
    )
    best = dropped(np.asarray(oracle))
    for name, priority in priorities.items():
        assert best <= dropped(np.asarray(_kept_forced(priority, 300))) * 1.001, name


@pytest.mark.slow
def test_v1_gives_broad_heads_more_blocks(priorities: dict):
    kept = np.asarray(_kept(priorities["hads_v1"], 300))[0].sum((1, 2))
    assert np.argsort(kept).tolist() == np.argsort(v1_profile().entropy[1]).tolist()
    query, key = map(jnp.asarray, inputs())
    with pytest.raises(ValueError, match=r"needs knowledge=V1Profile\(...\) of the model .*; got None"):
        MethodMask.of("hads_v1", PROFILE, [300, 301]).blocks(1, query, key)


@pytest.mark.parametrize("length", [96, 93])
def test_entropy_is_that_of_dense_weights(length: int):
    query, key = case.random_inputs(1, length, PROFILE, batch=2)
    grid = CausalGrid(length, 16)
    entropy_of = jax.jit(lambda q, k: v1.mean_entropy(q, k, grid))
    weights = case.dense_weights(query, key)
    entropy = -np.sum(weights * np.log(np.where(weights > 0, weights, 1)), -1)[..., 1:]
    wanted = (entropy / np.log(np.arange(2, length + 1))).mean(-1)
    np.testing.assert_allclose(entropy_of(query, key), wanted, rtol=1e-5)
    np.testing.assert_allclose(entropy_of(0 * query, key), 1, rtol=1e-5)  # even weights


def test_mass_by_distance():
    mass = np.random.default_rng(0).random((4, GRID.columns, GRID.columns))
    got = v1.by_distance(mass, GRID)
    for n, (start, end) in enumerate(itertools.pairwise(BUCKETS)):
        at = (GRID.distance() >= start) & (GRID.distance() < end) & (np.arange(GRID.columns) > 0)
        farthest = at if at.any() else farthest  # distances that no row has count as the farthest distance seen
        np.testing.assert_allclose(got[:, n], mass[:, farthest].mean(-1), rtol=1e-5)


@pytest.mark.slow
def test_v1_profile_of_a_tiny_model(tmp_path: Path):
    model = case.tiny_model()
    tokens = np.random.default_rng(0).integers(0, 512, (2, 96)).astype(np.int32)
    known = v1.measure(model, tokens, 16)

    layers = Layers(model)
    entropy = np.zeros((2, 4))
    for sequence in tokens:
        x, rotation = layers.start(jnp.asarray(sequence[None]))
        for n, weights in enumerate(layers.weights):
            inputs = project(layers.graph, weights, x, rotation, None)
            attended = case.dense_weights(*map(np.asarray, inputs[:2]))[0]
            of_query = -np.sum(attended * np.log(np.where(attended > 0, attended, 1)), -1)[:, 1:]
            entropy[n] += (of_query / np.log(np.arange(2, 97))).mean(-1) / 2
            x = attend(layers.graph, model.attention_fn, weights, x, rotation, inputs)
    np.testing.assert_allclose(known.entropy, entropy, rtol=1e-4)
    assert known.distance_mass.shape == (2, 4, len(BUCKETS)) and (known.distance_mass > 0).all()

    known.save(tmp_path / "v1.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["v1.npz"]
    again = v1.V1Profile.load(tmp_path / "v1.npz")
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(known, again, strict=True))
    assert [(x.shape, x.dtype) for x in v1.shape(model.config)] == [(x.shape, x.dtype) for x in known]
