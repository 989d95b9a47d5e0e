"""HADS in models whose tokens see a window: blocks outside are never chosen, and budgets count those inside."""

from __future__ import annotations

import dataclasses

import hads_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_model import TINY, build

from xsake import hads
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.model import HadsBudget, generate

WINDOW, BLOCK, LENGTH = 70, 16, 203
PROFILE = dataclasses.replace(case.ONE_LAYER, window=WINDOW)
GRID = PROFILE.grid(LENGTH)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 18, 70, 203, 500])
def test_the_grid_has_the_blocks_of_visible_tokens(window: int):
    grid = CausalGrid(LENGTH, BLOCK, window=window)
    tokens = np.zeros((grid.columns * BLOCK,) * 2, bool)
    tokens[:LENGTH, :LENGTH] = case.visible(LENGTH, window)
    tiles = tokens.reshape(grid.columns, BLOCK, grid.columns, BLOCK)
    np.testing.assert_array_equal(grid.causal(), tiles.any((1, 3)))
    np.testing.assert_array_equal(grid.full(), tiles.all((1, 3)))
    assert grid.blocks == grid.causal().sum()
    assert not (grid.forced() & ~grid.causal()).any()


def test_a_mask_keeps_an_exact_number_of_blocks_inside_the_window():
    query, key = case.random_inputs(2, LENGTH, PROFILE)
    mask = jax.jit(lambda q, k: hads.select(q, k, PROFILE, 0.7, layer=0, transpose=False))(query, key)
    blocks = np.asarray(mask.to_blocks())
    assert blocks.sum() == round(0.7 * 4 * GRID.blocks) and not (blocks & ~GRID.causal()).any()
    assert mask.is_causal and mask.local_window_size == (WINDOW - 1, 0)


@pytest.fixture(scope="module")
def model():
    return case.one_layer(window=WINDOW)


PROMPTS = case.PROMPTS


@pytest.mark.parametrize("chunk", [pytest.param(None, marks=pytest.mark.slow), 128])
@pytest.mark.slow  # the other tests choose inside windows
def test_all_blocks_of_the_window_are_dense_attention(model, chunk):
    """In a prompt that is read whole or in chunks, and in the tokens that follow it."""
    dense = generate(model, PROMPTS, max_new_tokens=4)
    assert (
        generate(
            model, PROMPTS, max_new_tokens=4, hads=HadsBudget(PROFILE, 1.0, decode=1.0, policy="always"), chunk=chunk
        )
        == dense
    )


def test_profiles_of_other_windows_are_refused(model, tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    again = hads.HadsProfile.load(tmp_path / "profile.json")
    assert again.window == WINDOW and again.grid(LENGTH) == GRID
    other = dataclasses.replace(PROFILE, window=None)
    with pytest.raises(ValueError, match="a window of 70 tokens, and the profile of 'random' was made for no window"):
        generate(model, PROMPTS, max_new_tokens=1, hads=HadsBudget(other, 1.0, policy="always"))
    short = [PROMPTS[0][:68]]
    with pytest.raises(ValueError, match="which matters at 72 tokens"):
        generate(model, short, max_new_tokens=4, hads=HadsBudget(other, 1.0, decode=1.0, policy="always"))
    two, message = (
        case.random_profile(head_dim=16),
        r"in this model layers \[0\], and the profile of 'random' leaves out no",
    )
    with pytest.raises(ValueError, match=message):
        generate(build(config=SOME), PROMPTS, max_new_tokens=1, hads=HadsBudget(two, 1.0, policy="always"))


# One layer with a window and positions of its own, then one without, as in Gemma 3.
SOME = dataclasses.replace(TINY, window=WINDOW, full_every=2, window_rope_base=1e3)


@pytest.mark.parametrize("chunk", [None, pytest.param(128, marks=pytest.mark.slow)])
def test_layers_with_a_window_are_left_alone_where_others_have_none(tmp_path, chunk):
    """In a prompt and in the tokens that follow it: with all blocks, as densely; budgets are of the other layers."""
    dataclasses.replace(case.ONE_LAYER, windowed=(0,)).save(tmp_path / "profile.json")
    profile, model = hads.HadsProfile.load(tmp_path / "profile.json"), build(config=SOME)
    assert (profile.layers, profile.model_layers, profile.row(0), profile.row(1)) == (1, 2, None, 0)
    options = dict(max_new_tokens=3, chunk=chunk)
    dense = generate(model, PROMPTS, **options)
    assert generate(model, PROMPTS, **options, hads=HadsBudget(profile, 1.0, decode=1.0, policy="always")) == dense
    query, key = case.random_inputs(2, LENGTH, profile)
    mask_fn = hads.HadsMask.of(profile, 0.7, LENGTH)
    assert mask_fn(0, query, key) is None
    mask = jax.jit(lambda query, key: mask_fn(1, query, key))(query, key)
    assert np.asarray(mask.to_blocks()).sum() == round(0.7 * 4 * profile.grid(LENGTH).blocks)
    with pytest.raises(ValueError, match="layer=0 has a window, and other layers have none: HADS leaves it alone"):
        hads.select(query, key, profile, 0.7, layer=0)


@pytest.mark.parametrize("as_function", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_without_a_window_are_calibrated(as_function):
    """By layers and as a function: the same profile."""
    model, tokens = build(config=SOME), np.random.default_rng(0).integers(512, size=(1, 144))
    options = dict(name="tiny", block=BLOCK, steps=2)
    profile = hads.calibrate(model, tokens, **options)
    assert (profile.layers, profile.windowed, profile.window) == (1, (0,), None)
    if as_function:
        other = hads.calibrate(lambda attention, tokens: model(tokens, attention=attention), tokens, **options)
        assert (other.layers, other.windowed, other.window) == (1, (0,), None)
        np.testing.assert_allclose(other.features, profile.features, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(other.sensitivity, profile.sensitivity, rtol=1e-3)


@pytest.mark.slow
def test_a_windowed_model_is_calibrated_beyond_its_window(model):
    tokens = np.random.default_rng(0).integers(512, size=(2, LENGTH))
    profile = hads.calibrate(model, tokens, name="tiny", block=BLOCK, steps=10)
    assert profile.window == WINDOW and (profile.head_shares <= 1).all()
    run = nnx.jit(lambda model, mask_fn: model(jnp.asarray(tokens), mask_fn=mask_fn))
    dense = nnx.jit(lambda model: model(jnp.asarray(tokens)))(model)
    all_blocks = run(model, hads.HadsMask.of(profile, 1.0, LENGTH))
    np.testing.assert_allclose(all_blocks, dense, atol=1e-3)
