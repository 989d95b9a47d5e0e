"""Rivals that are no block masks, or look at more than one layer: MInference's lines of tokens, Kascade's anchors."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import hads_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.hads import kascade, minference
from benchmarks.hads.lines import Lines, first_of_last, keep_lines, pairs_of, recall
from benchmarks.hads.methods import METHODS
from xsake.hads.calibration.layerwise import Layers
from xsake.hads.profile.budgets import layer_counts
from xsake.hads.study.layerwise import run
from xsake.hads.study.methods.layer import Layer
from xsake.hads.study.methods.mask import MethodMask
from xsake.model import Transformer

PROFILE = case.random_profile(block=16)
LENGTH = 250
GRID = PROFILE.grid(LENGTH)
T = np.arange(LENGTH)
BACK = T[:, None] - T
BLOCKS = T // 16


def dense_mask(lines: Lines, forced: bool) -> np.ndarray:
    """bool[B, H, T, T], pair by pair."""
    columns, diagonals = np.asarray(lines.columns), np.asarray(lines.diagonals)
    last = (first_of_last(GRID) <= T) & (len(columns) == 2)
    kept = np.where(
        last[:, None],
        columns[-1][..., None, :] | diagonals[-1][..., np.maximum(BACK, 0)],
        columns[0][..., None, :] | diagonals[0][..., np.maximum(BACK, 0)],
    )
    if forced:
        kept |= case.forced_blocks(GRID.columns)[BLOCKS[:, None], BLOCKS]
    return kept & (BACK >= 0)


@pytest.mark.parametrize("forced", [False, True])
def test_lines_are_as_many_as_fit_and_attend_as_their_mask_says(forced: bool):
    rng = np.random.default_rng(0)
    query, key = case.random_inputs(0, LENGTH, PROFILE)
    value = rng.standard_normal(key.shape).astype(np.float32)
    ranks = [rng.permuted(np.tile(T, (1, 4, 1)), axis=-1) for _ in range(2)]
    ranks[1] = np.concatenate([np.zeros((1, 4, 1), int), 1 + ranks[1][..., ranks[1][0, 0] < LENGTH - 1]], -1)
    ranks[1] = ranks[1].argsort(-1).argsort(-1)  # the main diagonal first: no query without a key
    vertical = jnp.asarray([0.04, 0.5, 0.97, 0.2])

    @jax.jit
    def go(query, key, value):
        budgets = [[jnp.full(1, 12_000.0)], [jnp.full(1, 9_000.0), jnp.full(1, 4_000.0)]]
        found = [keep_lines(*map(jnp.asarray, ranks), vertical, some, GRID, jnp.asarray(forced)) for some in budgets]
        return found, found[1].attend(query, key, value), recall(query, key, found)

    (one, two), out, held = go(query, key, value)
    masks = [dense_mask(one, forced), dense_mask(two, forced)]
    for lines, mask in ((one, masks[0]), (two, masks[1])):
        np.testing.assert_array_equal(lines.pairs, mask.sum((-2, -1)))
        np.testing.assert_allclose(lines.counts(), mask.sum((-2, -1)) * GRID.blocks / pairs_of(GRID), rtol=1e-6)
    last = first_of_last(GRID) <= T
    for pairs, budget in (
        (masks[0].sum((-2, -1)), 12_000),
        (masks[1][..., ~last, :].sum((-2, -1)), 9_000),
        (masks[1][..., last, :].sum((-2, -1)), 4_000),
    ):
        assert (pairs <= budget).all() and (pairs > budget - LENGTH).all()  # one more line would not fit
    weights = case.dense_weights(query, key)
    np.testing.assert_allclose(held, [(weights * mask).sum(-1).mean(-1) for mask in masks], rtol=1e-4)
    weights = weights * masks[1]
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(out, np.einsum("bhts,bshd->bthd", weights, np.repeat(value, 2, 2)), rtol=1e-3, atol=1e-5)


def test_lines_of_a_head_are_those_of_its_pattern():
    query, key = map(jnp.asarray, case.random_inputs(1, LENGTH, PROFILE))
    columns, diagonals = (np.asarray(x)[0] for x in jax.jit(minference.last_queries)(query, key))
    weights = case.dense_weights(np.asarray(query), np.asarray(key))[0, :, -64:]
    np.testing.assert_allclose(columns, weights.sum(-2), rtol=1e-4)
    for d in (0, 5, 199, 249):
        wanted = [weights[:, t, LENGTH - 64 + t - d] for t in range(64) if LENGTH - 64 + t >= d]
        np.testing.assert_allclose(diagonals[:, d], np.sum(wanted, 0), rtol=1e-4)
    known = minference.Patterns(jnp.asarray([[True, False] * 2] * 2), jnp.full((2, 4), 0.5))
    count = round(0.5 * 4 * GRID.blocks)
    x = Layer(query, key, GRID, 1, count, PROFILE, knowledge=known)

    @jax.jit
    def lines(query, key):
        here = dataclasses.replace(x, query=query, key=key)
        return minference.minference(here), minference.minference(
            dataclasses.replace(here, last_count=jnp.asarray([60]))
        )

    kept, with_last = lines(query, key)
    down, along = np.asarray(kept.columns)[0, 0], np.asarray(kept.diagonals)[0, 0]
    assert down[0].tolist() == sorted(down[0].tolist(), reverse=True)  # the A-shape: no hole
    assert along[0].tolist() == sorted(along[0].tolist(), reverse=True)
    for found, by in ((down[1], columns[1]), (along[1], diagonals[1])):
        assert found[:30].all() and by[30:][found[30:]].min() >= by[30:][~found[30:]].max()
    assert 0.98 * count < float(kept.counts().sum()) <= count
    assert len(with_last.columns) == 2 and 0.95 * count < float(with_last.counts().sum()) <= count
    with pytest.raises(ValueError, match=r"minference needs knowledge=Patterns\(...\)"):
        minference.minference(dataclasses.replace(x, knowledge=None))


def test_the_best_anchors_are_those_of_all_combinations():
    rng = np.random.default_rng(0)
    gain = rng.random((7, 7))

    def total(anchors: tuple[int, ...]) -> float:
        return sum(gain[max(a for a in anchors if a <= layer), layer] for layer in range(7))

    every = [(0, *others) for others in itertools.combinations(range(1, 7), 2)]
    assert kascade.best_anchors(gain, 3) == list(max(every, key=total))
    alike = rng.random((7, 7, 2, 2))
    plan = kascade.plan_of(alike, np.ones(7), 3)
    assert plan.anchor[0] and plan.anchor.sum() == 3
    for layer in range(7):
        anchor = max(np.flatnonzero(plan.anchor[: layer + 1]))
        wanted = [0, 1] if anchor == layer else alike[anchor, layer].argmax(-1).tolist()
        assert plan.head[layer].tolist() == wanted


@pytest.fixture(scope="module")
def model() -> Transformer:
    return case.tiny_model(layers=3)


@pytest.mark.slow  # a whole model; what it is made of is tested above and below
def test_a_layer_takes_the_blocks_of_its_anchor(model: Transformer, tmp_path: Path):
    """Layer 1 reuses layer 0 with its heads exchanged, layer 2 looks for itself."""
    config = model.config
    profile = case.random_profile(layers=3, head_dim=config.head_dim, block=16)
    tokens = np.random.default_rng(0).integers(0, 500, (1, 256)).astype(np.int32)
    kascade.Plan(np.array([True, False, True]), np.array([[0, 1], [1, 0], [0, 1]], np.int32)).save(tmp_path / "k.npz")
    known = kascade.Plan.load(tmp_path / "k.npz")
    counts = np.full(3, layer_counts(profile, 0.5, 256).sum() // 3)
    mask_fn = MethodMask.of("kascade+forced", jax.tree.map(jnp.asarray, profile), counts, knowledge=known)
    rng = np.random.default_rng(1)
    found, memory, choose = [], None, jax.jit(mask_fn.choose)
    for number in range(3):
        query, key = (jnp.asarray(rng.standard_normal((1, 256, n, 16)), jnp.float32) for n in (4, 2))
        blocks, memory = choose(jnp.int32(number), query, key, memory)
        found.append(np.asarray(blocks)[0])
        assert found[-1].sum() == counts[number] and found[-1][:, case.forced_blocks(16)].all()
        # Heads of a group share their blocks, but for a remainder that does not divide evenly.
        assert (found[-1][::2] == found[-1][1::2]).mean() > 0.97
    assert (found[1] == found[0][[2, 3, 0, 1]]).mean() > 0.97 and (found[2] != found[0]).mean() > 0.1
    with pytest.raises(NotImplementedError, match=r"from what layers before it chose.*use layerwise.run"):
        mask_fn.blocks(0, query, key)
    plan = kascade.measure(model, tokens, 16)
    assert {"kascade", "minference"} <= set(METHODS)
    assert plan.anchor.all() and plan.head.tolist() == [[0, 1]] * 3  # five anchors for three layers


@pytest.mark.slow  # a whole model; what it is made of is tested above and below
def test_a_model_runs_under_lines(model: Transformer, tmp_path: Path):
    """With all pairs, a run is dense; with half of them, it keeps half."""
    profile = case.random_profile(layers=3, head_dim=model.config.head_dim, block=16)
    tokens = np.random.default_rng(0).integers(0, 500, (1, 256)).astype(np.int32)
    minference.measure(model, tokens, 16).save(tmp_path / "m.npz")
    known, layers = minference.Patterns.load(tmp_path / "m.npz"), Layers(model)
    assert known.vertical.shape == (3, 4) and known.a_shape.dtype == bool
    dense, _ = run(layers, jnp.asarray(tokens))
    whole = 3 * 4 * profile.grid(256).blocks
    for share in (1.0, 0.5):
        mask_fn = MethodMask.of("minference", profile, layer_counts(profile, share, 256), knowledge=known)
        states, active = run(layers, jnp.asarray(tokens), mask_fn)
        assert 0.97 * share < float(active.sum()) / whole <= share * (1 + 1e-6)
        far = float(jnp.abs(states - dense).max())
        assert far < 1e-3 if share == 1 else far > 1e-2
