"""Calibration: the fit, the sensitivity and the tables against dense numpy, and the whole on a tiny model."""

from __future__ import annotations

import hads_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xsake import hads
from xsake.hads.calibration import by_layer, observe
from xsake.hads.calibration.block_statistics import block_statistics
from xsake.hads.calibration.calibrate import _for_large_errors
from xsake.hads.calibration.fit import fit_estimator
from xsake.hads.calibration.memory import needed
from xsake.hads.calibration.sensitivity import cost_of_dropping
from xsake.hads.calibration.steps import Steps
from xsake.hads.calibration.tables import tabulate
from xsake.hads.profile.budgets import uniform_counts
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.profile import FREE_SHARES
from xsake.hads.profile.rule import RULE, Rule
from xsake.hads.selection.choice import choose
from xsake.hads.selection.estimate import block_mass
from xsake.hads.selection.gain import sorted_gains
from xsake.hads.selection.pooled import pool
from xsake.hads.selection.rows import Rows
from xsake.model import Transformer

# One worker: it has the model and its profile.
pytestmark = pytest.mark.xdist_group("calibration")

TOKENS = np.random.default_rng(0).integers(0, 512, (2, 250))


@pytest.fixture(scope="module")
def model() -> Transformer:
    return case.tiny_model()


@pytest.fixture(scope="module")
def profile(model: Transformer) -> hads.HadsProfile:
    seen: list[tuple[str, int]] = []

    def progress(what: str, done: int, of: int) -> None:
        seen.append((what, sum(x.shape[-2:] == (16, 16) for x in jax.live_arrays())))

    made = hads.calibrate(model, TOKENS, name="tiny", block=16, steps=30, progress=progress)
    assert [what for what, _ in seen] == ["heads of each layer"] * 3 + ["sensitivity of heads"] * 3
    # No layer's statistics outlive the next layer's: mass, its square and the tokens' feature of two sequences.
    before, *during = (arrays for _, arrays in seen)
    assert max(during) <= before + 2 * 3 and during[-1] == before
    return made


def test_a_calibration_that_was_stopped_goes_on(model, profile, tmp_path, monkeypatch):
    """Stopped in the second layer, between two files of it, and in the backward pass: each step is done once, and the
    profile is that of a calibration that was not stopped."""
    options = dict(name="tiny", block=16, steps=30, steps_folder=tmp_path / "steps")
    observed: list[int] = []
    observe_block = by_layer.observe_block
    monkeypatch.setattr(by_layer, "observe_block", lambda *a: observed.append(1) or observe_block(*a))

    def stop_at(*place):
        def progress(*said):
            if said[:2] == place:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            hads.calibrate(model, TOKENS, progress=progress, **options)

    stop_at("heads of each layer", 1)
    assert len(observed) == 2  # sequences
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        put = Steps.put

        def stop(self, step, arrays):
            if step == "layer-1":
                raise KeyboardInterrupt
            put(self, step, arrays)

        patch.setattr(Steps, "put", stop)
        hads.calibrate(model, TOKENS, **options)
    stop_at("sensitivity of heads", 1)
    assert len(observed) == 6
    found = hads.calibrate(model, TOKENS, **options)
    assert len(observed) == 6
    jax.tree.map(np.testing.assert_array_equal, found, profile)
    for change, word in (({"block": 8}, "block"), ({"name": "other"}, "name")):
        with pytest.raises(ValueError, match=f"unfinished calibration that differs in {word}: delete the folder"):
            hads.calibrate(model, TOKENS, **options | change)
    with pytest.raises(ValueError, match="differs in texts"):
        hads.calibrate(model, TOKENS[:, ::-1], **options)
    other = nnx.clone(model)
    other.norm.scale[...] += 1.0
    with pytest.raises(ValueError, match="differs in weights"):
        hads.calibrate(other, TOKENS, **options)


def test_rows_may_be_taller_than_blocks(model: Transformer):
    tall = hads.calibrate(model, TOKENS[:1], name="tiny", block=8, block_q=32, steps=30)
    assert (tall.block, tall.block_q, tall.rule) == (8, 32, Rule.of_blocks(4))
    query, key = case.random_inputs(0, 250, tall)
    mask = jax.jit(lambda q, k: hads.select(q, k, tall, 0.7, layer=1))(query, key)
    assert np.asarray(mask.to_blocks()).sum() == hads.layer_counts(tall, 0.7, 250)[1]
    with pytest.raises(ValueError, match="block_q=20 must be a multiple of block=8"):
        hads.calibrate(model, TOKENS, name="tiny", block=8, block_q=20)


def test_fit_finds_weights_that_explain_the_masses():
    """From masses that a known estimator made, its weights are found again."""
    profile = case.random_profile(block=16)
    grid = CausalGrid(20 * 16, 16)
    query, key = map(jnp.asarray, case.random_inputs(0, grid.length, profile, batch=3))
    pooled = pool(query, key, grid)
    mass = block_mass(pooled, profile.estimator(0), grid)
    estimator, left = fit_estimator(pooled, mass, grid, steps=300)
    assert left < 0.01
    free = grid.causal() & ~grid.forced()
    found = np.asarray(block_mass(pooled, estimator, grid))
    # How the forced blocks share their mass is not asked for.
    assert np.abs(found - np.asarray(mass))[..., free].mean() < 0.02 * np.asarray(mass)[..., free].mean()
    assert (
        estimator.distance[:, 10:] == estimator.distance[:, 9:10]
    ).all()  # 16 to 23 blocks back is the farthest seen
    with pytest.raises(ValueError, match="64 tokens are 4 blocks of 16: all are always on"):
        fit_estimator(pooled, mass, CausalGrid(64, 16))


def test_cost_of_dropping_is_that_of_dense_attention():
    profile = case.random_profile()
    grid = CausalGrid(90, 16)
    query, key = case.random_inputs(1, 90, profile, batch=2)
    rng = np.random.default_rng(2)
    value = rng.standard_normal(key.shape).astype(np.float32)
    gradient = rng.standard_normal(query.shape).astype(np.float32)
    kept = grid.forced() | (rng.random((2, 4, 6, 6)) < 0.3) & grid.causal()
    layer = observe.Touched(*map(jnp.asarray, (query, key, value, gradient)))
    error, dropped = cost_of_dropping(layer, jnp.asarray(kept), grid)

    weights = case.dense_weights(query, key)
    v = np.repeat(value, 2, 2).astype(np.float64)
    elements = np.repeat(np.repeat(kept, 16, 2), 16, 3)[..., :90, :90]
    sparse = weights * elements
    held = sparse.sum(-1, keepdims=True)
    change = np.einsum("bhts,bshd->bthd", weights - sparse / held, v)
    felt = (change * gradient).sum(-1)
    np.testing.assert_allclose(error, (felt**2).sum((0, 1)), rtol=1e-4)
    np.testing.assert_allclose(dropped, ((1 - held[..., 0]) ** 2).sum((0, 2)), rtol=1e-4)


def test_sensitivity_is_eased_more_within_layers_than_between_them():
    eased = _for_large_errors(np.array([[1.0, 16.0], [256.0, 4096.0]]), RULE)
    np.testing.assert_allclose(eased[:, 1] / eased[:, 0], 4, rtol=1e-5)
    np.testing.assert_allclose(eased[1] / eased[0], 64, rtol=1e-5)
    assert eased.mean() == pytest.approx(1)


def test_signed_likelihood_has_the_curvature_of_the_divergence():
    """Mean of (gradient · step)² over draws against twice the KL divergence of a small step."""
    weight, states = jax.random.normal(jax.random.key(0), (3, 5)), jax.random.normal(jax.random.key(1), (1, 6, 3))
    step = 0.01 * jax.random.normal(jax.random.key(2), states.shape)

    @jax.jit
    @jax.vmap
    def draw(key):
        likelihood = lambda s: observe.signed_likelihood(lambda x: x @ weight, s, key, 4)  # noqa: E731
        return jnp.square((jax.grad(likelihood)(states) * step).sum())

    curvature = draw(jax.random.split(jax.random.key(3), 20000)).mean()
    before, after = (jax.nn.log_softmax(s @ weight) for s in (states, states + step))
    divergence = (jnp.exp(before) * (before - after)).sum()
    assert abs(float(curvature / (2 * divergence)) - 1) < 0.05


def test_tables_follow_one_threshold_over_all_layers_and_heads():
    grid = CausalGrid(20 * 16, 16)
    rng = np.random.default_rng(0)
    gain = (
        rng.exponential(size=(3, 2, 20, 20)).astype(np.float32) * np.array([1, 2, 4], np.float32)[:, None, None, None]
    )
    free_gain = gain[:, :, grid.causal() & ~grid.forced()]
    tables = tabulate([free_gain])
    free = np.sort(free_gain, axis=None)
    for share, cut, layers, heads in zip(
        FREE_SHARES, tables.log_thresholds, tables.layer_shares, tables.head_shares, strict=True
    ):
        assert abs((free >= np.exp(cut) * 0.9999).mean() - share) < 2 / len(free)
        assert abs(layers.mean() - share) < 2 / len(free)
        assert layers[0] <= layers[1] < layers[2]
        np.testing.assert_allclose(heads.mean(-1), layers, rtol=1e-5)


def test_observation_is_what_the_layers_did(model: Transformer):
    tokens = jnp.asarray(TOKENS[:1])

    @nnx.jit
    def inputs_of(watched):
        inputs = []

        def attend(query, key, value, **options):
            inputs.append((query, key))
            return jax.nn.dot_product_attention(query, key, value, **options)

        watched.attention_fn = attend
        watched.hidden(tokens)
        return [block_statistics(query, key, block=16) for query, key in inputs]

    wanted_of = inputs_of(nnx.merge(*nnx.split(model)))
    seen = observe.observe(model, tokens, CausalGrid(tokens.shape[1], 16))
    assert len(seen) == len(wanted_of) == 2
    for layer, wanted in zip(seen, wanted_of, strict=True):
        for got, want in zip(layer.statistics, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-5)


@pytest.mark.slow  # the profile of a tiny model depends on them
def test_gradients_are_those_of_the_whole_model(model: Transformer):
    tokens, key = jnp.asarray(TOKENS[:1]), jax.random.key(5)

    def likelihood(nudges):
        calls = iter(nudges)
        watched = nnx.merge(*nnx.split(model))
        watched.attention_fn = lambda q, k, v, **o: jax.nn.dot_product_attention(q, k, v, **o) + next(calls)
        return observe.signed_likelihood(watched.logits, watched.hidden(tokens), key, 64)

    wanted = jax.jit(jax.grad(likelihood))([jnp.zeros((1, 250, 4, 16))] * 2)
    for (number, layer), want in zip(observe.touch(model, tokens, key, chunk=64), reversed(wanted), strict=True):
        assert want is wanted[number]
        np.testing.assert_allclose(layer.gradient, want, rtol=1e-3, atol=1e-4 * float(jnp.abs(want).max()))


@pytest.mark.slow  # the recorded profiles are made this way
def test_layers_one_after_the_other_give_the_profile_of_all_at_once(profile: hads.HadsProfile, model: Transformer):
    """Against calibration with every layer's statistics and gradients in memory together."""
    grid, count = CausalGrid(250, 16), len(TOKENS)
    free = grid.causal() & ~grid.forced()
    seen = [observe.observe(model, jnp.asarray(row[None]), CausalGrid(len(row), 16)) for row in TOKENS]
    layers = [jax.tree.map(lambda *x: jnp.concatenate(x), *(sequence[at] for sequence in seen)) for at in range(2)]
    mass, square = (np.stack([layer.statistics[at] for layer in layers])[..., free] for at in (0, 1))
    variance = np.maximum(square - mass**2, 0).sum((1, 3)) / mass.sum((1, 3))
    wanted = int(uniform_counts(1, 4, 1.5 * grid.forced_blocks / grid.blocks, grid)[0])
    sums = np.zeros((2, 2, 4))
    for n, row in enumerate(TOKENS):
        for at, one in dict(observe.touch(model, jnp.asarray(row[None]), jax.random.key(n))).items():
            rule = dict(sensitivity=np.ones(4, np.float32), burstiness=variance[at])
            kept = choose(seen[n][at].statistics.mass, Rows(grid), count=wanted, **rule)
            sums[:, at] += np.asarray(cost_of_dropping(one, kept, grid))
    sensitivity = _for_large_errors(sums[0] / sums[1], RULE)
    gains = np.zeros((count, 2, 4, free.sum()), np.float32)
    for at, layer in enumerate(layers):
        estimator, _ = fit_estimator(layer.pooled, layer.statistics.share, grid, steps=30)
        for name in estimator._fields:
            np.testing.assert_allclose(getattr(profile, name)[at], getattr(estimator, name), rtol=1e-4, atol=1e-5)
        found = layer.mass(estimator, grid)
        gain = np.asarray(sorted_gains(found, Rows(grid), sensitivity[at], RULE.own_part * variance[at])[-1])
        gains[:, at] = gain[np.isfinite(gain) & (gain >= 0)].reshape(count, 4, -1)
    tables = tabulate(gains)
    np.testing.assert_allclose(profile.sensitivity, sensitivity, rtol=1e-4)
    np.testing.assert_allclose(profile.burstiness, RULE.own_part * variance, rtol=1e-5)
    np.testing.assert_allclose(profile.log_thresholds, tables.log_thresholds, atol=1e-3)
    np.testing.assert_allclose(profile.head_shares, tables.head_shares, atol=2 / free.sum())
    np.testing.assert_allclose(profile.layer_shares, tables.layer_shares, atol=2 / free.sum())


def test_profile_of_a_tiny_model(profile: hads.HadsProfile, model: Transformer):
    assert (profile.layers, profile.q_heads, profile.kv_heads, profile.head_dim) == (2, 4, 2, 16)
    assert (profile.model, profile.block, profile.length, len(profile.digests)) == ("tiny", 16, 250, 2)
    assert profile.sensitivity.mean() == pytest.approx(1, rel=1e-5)


@pytest.mark.slow  # the code of docs/hads.md runs the model with its profile
def test_the_model_runs_with_its_profile_and_is_itself_at_full_budget(profile: hads.HadsProfile, model: Transformer):
    tokens = jnp.asarray(TOKENS)
    run = nnx.jit(lambda model, mask_fn: model(tokens, mask_fn=mask_fn))
    dense = nnx.jit(lambda model: model(tokens))(model)
    for budget, close in ((1.0, True), (0.5, False)):
        sparse = run(model, hads.HadsMask.of(profile, budget, tokens.shape[1]))
        assert np.isfinite(sparse).all()
        assert (np.abs(np.asarray(sparse - dense)).max() < 1e-4) == close


@pytest.mark.usefixtures("unchecked_annotations")
def test_wrong_calibrations(model: Transformer):
    with pytest.raises(ValueError, match="128 tokens have 8 blocks of 16, most of them always on: use at least 144"):
        hads.calibrate(model, TOKENS[:, :128], name="tiny", block=16)
    with pytest.raises(ValueError, match="at least one sequence; got 0"):
        hads.calibrate(model, TOKENS[:0], name="tiny", block=16)


def test_memory_follows_one_layer(model: Transformer):
    """The compiler's count, from shapes alone: more sequences add one layer's statistics, more layers only weights."""
    shapes = nnx.eval_shape(case.tiny_model)
    memory = needed(shapes, length=250, sequences=8, block=16)
    one = 4 * (3 * 4 * 16 * 16 + (4 + 2) * 16 * 5 * 16)
    assert 8 * one < memory.stages["fit of a layer"] < 4 * 8 * one
    assert memory.weights == sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
    assert memory.device == memory.weights + max(memory.stages.values())
