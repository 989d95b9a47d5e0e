"""Calibration of any JAX function: loops, scans, `vmap`, `checkpoint`, cut in layers or not, give one profile."""

from __future__ import annotations

from functools import partial
from typing import Any

import any_model as model
import hads_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sweep import sweep

from xsake import hads
from xsake.hads.calibration import rematerialise, whole
from xsake.hads.calibration.by_layer import ByLayer
from xsake.hads.calibration.steps import Steps
from xsake.hads.calibration.whole import Whole
from xsake.hads.profile.causal_grid import CausalGrid

pytestmark = pytest.mark.xdist_group("any model")

WEIGHTS = model.weights()
GRID = CausalGrid(model.LENGTH, model.BLOCK)
CLOSE = partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-4)


def calibrated(apply: Any, tokens: np.ndarray = model.TOKENS, **options: Any) -> hads.HadsProfile:
    return hads.calibrate(apply, tokens, name="any", block=model.BLOCK, steps=10, sensitivity_sequences=1, **options)


def watched(one: whole.Watched, tokens: np.ndarray = model.TOKENS, grid: CausalGrid = GRID) -> tuple[list, np.ndarray]:
    """Each layer's observations, and the costs of dropping every block that is not forced."""
    seen = list(one.observe(tokens, grid, Steps(None, {}), 0))
    heads = seen[0][0].statistics.mass.shape[1]
    kept = jnp.broadcast_to(grid.forced(), (1, heads, grid.rows, grid.columns))
    return seen, one.costs(jnp.asarray(tokens[:1], jnp.int32), lambda layer: kept, grid, jax.random.key(3))


@pytest.fixture(scope="module")
def wanted() -> tuple[list, np.ndarray]:
    """Of the model in layers, the road of our own models."""
    return watched(ByLayer(model.cut(WEIGHTS), model.LENGTH))


FORMS = {
    "checkpoint": (model.rematerialised, None),
    "scan": (model.scan, model.LAYERS),
    "vmap": (model.mapped, None),
}


@pytest.mark.parametrize("form", sweep(FORMS, slow=["vmap", "checkpoint"]))  # docs/hads_any_model.md has a vmap, too
def test_every_form_of_a_function_is_seen_as_its_layers_are(form: str, wanted: tuple[list, np.ndarray]):
    run, layers = FORMS[form]
    jax.tree.map(CLOSE, watched(Whole(partial(run, WEIGHTS), model.LENGTH, layers)), wanted)


@pytest.mark.slow  # from what the test above compares, all else is one road
def test_a_function_has_the_profile_of_its_layers():
    found, wanted = calibrated(partial(model.loop, WEIGHTS)), calibrated(model.cut(WEIGHTS))
    assert (found.layers, found.kv_heads, found.window) == (model.LAYERS, model.KV_HEADS, None)
    jax.tree.map(CLOSE, found, wanted)


def wide(x: jax.Array, *_: Any) -> tuple[jax.Array, None]:
    """A layer that computes much more than it gives."""
    return rematerialise.mark(x + jnp.tanh(x[:, None] * jnp.linspace(0, 1, 4096)[None]).sum(1)), None


@pytest.mark.parametrize(
    "layers",
    [
        lambda x: [x := wide(x)[0] for _ in range(8)][-1],
        jax.jit(lambda x: [x := wide(x)[0] for _ in range(8)][-1]),
        lambda x: jax.lax.scan(wide, x, None, 8)[0],
    ],
    ids=["loop", "jit", "scan"],
)
def test_what_lies_between_marks_is_computed_again(layers: Any):
    def again(x: jax.Array) -> jax.Array:
        program = jax.make_jaxpr(layers)(x)
        return rematerialise.run(program.jaxpr, program.consts, x)[0]

    x = jnp.linspace(0, 1, 64)
    plain, less = (jax.jit(jax.grad(lambda x, run=run: run(x).sum())).lower(x).compile() for run in (layers, again))
    CLOSE(less(x), plain(x))
    assert less.memory_analysis().temp_size_in_bytes < plain.memory_analysis().temp_size_in_bytes / 2


@pytest.mark.slow  # the other tests have every part
def test_our_own_transformer_is_a_function_as_any_other():
    own, tokens = case.tiny_model(window=70), np.random.default_rng(0).integers(512, size=(1, 203))
    grid = CausalGrid(203, 16, window=70)
    one = Whole(lambda attention, tokens: own(tokens, attention=attention), 203, None)
    assert one.window == 70
    jax.tree.map(CLOSE, watched(one, tokens, grid), watched(ByLayer(own, 203), tokens, grid))


@pytest.mark.slow
def test_few_layers_at_a_time_are_all_layers(monkeypatch: pytest.MonkeyPatch, wanted: tuple[list, np.ndarray]):
    monkeypatch.setattr(whole, "AT_ONCE", 1)
    seen = Whole(partial(model.scan, WEIGHTS), model.LENGTH, model.LAYERS).observe(
        model.TOKENS, GRID, Steps(None, {}), 1
    )
    jax.tree.map(CLOSE, list(seen), wanted[0][1:])


def test_a_scale_is_seen_in_the_queries(wanted: tuple[list, np.ndarray]):
    """Logits of half the queries at twice the scale are the same."""

    def halved(attention, query, key, value, **rules):
        return attention(query / 2, key, value, scale=2 * model.DIM**-0.5, **rules)

    scaled = Whole(lambda attention, tokens: model.loop(WEIGHTS, partial(halved, attention), tokens), 90, None)
    (seen, *_), *_ = scaled.observe(model.TOKENS[:1], GRID, Steps(None, {}), 0)
    jax.tree.map(CLOSE, seen, wanted[0][0][0])


def numbered(numbers: list[int]) -> Any:
    """The model with other numbers for its layers."""

    def apply(attention, tokens):
        calls = iter(numbers)
        return model.loop(WEIGHTS, lambda *qkv, layer, **rules: attention(*qkv, layer=next(calls), **rules), tokens)

    return apply


def windowed(attention, tokens):
    def in_some(*qkv, layer, **rules):
        return attention(*qkv, layer=layer, local_window_size=(20 + layer, 0), **rules)

    return model.loop(WEIGHTS, in_some, tokens)


def asking(**rules: Any) -> Any:
    return lambda attention, tokens: model.loop(WEIGHTS, partial(attention, **rules), tokens)


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    "apply, error, message",
    [
        (partial(model.scan, WEIGHTS), ValueError, "layer is traced, as in a scan over layers, .* give layers="),
        (numbered([1, 2]), ValueError, r"called for layers \[1, 2\]: number 2 layers 0 to 1"),
        (numbered([0, 0]), ValueError, "attention was called 2 times for layer 0"),
        (lambda attention, tokens: model.logits(WEIGHTS, WEIGHTS["embed"][tokens]), ValueError, "never called"),
        (lambda attention, tokens: model.loop(WEIGHTS, attention, tokens)[0], ValueError, r"must give logits \[1, 90"),
        (windowed, NotImplementedError, "layers differ in their windows"),
        (asking(dropout_rate=0.1), NotImplementedError, "dropout_rate=0.1: attention weights are never formed"),
        (asking(logits_soft_cap=30.0, sinks=1), NotImplementedError, "logits_soft_cap, sinks: HADS knows is_causal"),
    ],
)
def test_wrong_functions_are_refused(apply: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        calibrated(apply, model.TOKENS[:1])


@pytest.mark.slow  # called twice and not at all are told by one count
def test_a_scan_over_more_layers_than_it_says_is_refused():
    with pytest.raises(ValueError, match="attention was called 0 times for layer 2"):
        calibrated(partial(model.scan, WEIGHTS), model.TOKENS[:1], layers=model.LAYERS + 1)
