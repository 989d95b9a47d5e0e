"""Integer sums of dQ: they never overflow, they keep NaN, and their unit is below the precision of bfloat16."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.kernels_pallas_gpu.hopper.fused.fixed_point import Units, to_summands

BATCH, TOKENS, HEADS, KV_HEADS, DIM = 1, 96, 4, 2, 32


def inputs(seed: int, outlier: float = 1.0) -> dict[str, jax.Array]:
    """Inputs of one dense attention. `outlier` multiplies one channel of the keys and one value."""
    rng = np.random.default_rng(seed)
    q, k, v, d_out = (
        rng.standard_normal((BATCH, TOKENS, heads, DIM)).astype(np.float32)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    k[..., 3] *= outlier
    v[:, 7] *= outlier
    k_all, v_all = (np.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    s = np.einsum("bthd,bshd->bhts", q, k_all) * DIM**-0.5
    lse = np.log(np.exp(s - s.max(-1, keepdims=True)).sum(-1)) + s.max(-1)
    p = np.exp(s - lse[..., None])
    d_p = np.einsum("bthd,bshd->bhts", d_out, v_all)
    delta = (p * d_p).sum(-1)
    terms = (p * (d_p - delta[..., None]))[..., None] * k_all.swapaxes(1, 2)[:, :, None]  # [B, H, T, S, D]
    return dict(key=k, value=v, d_out=d_out, lse=lse, delta=delta, terms=terms)


def units_of(given: dict) -> Units:
    return Units.of_dq(*(jnp.asarray(given[name]) for name in ("key", "value", "d_out", "lse", "delta")))


def elements(units: Units) -> np.ndarray:
    """[B, H, T, D]"""
    channels = np.repeat(np.asarray(units.channels), HEADS // KV_HEADS, axis=1)
    return np.asarray(units.rows)[..., None] * channels[:, :, None]


@pytest.mark.parametrize("outlier", [1.0, 100.0])
@pytest.mark.parametrize("seed", range(3))
def test_every_partial_sum_fits(seed, outlier):
    given = inputs(seed, outlier)
    most = np.abs(given["terms"]).sum(3) * (1 + 2**-8)  # whatever the order, no sum is larger; dS is rounded to 16 bits
    assert (most / elements(units_of(given))).max() < 2**30 * (1 + 2**-8)  # a factor of two is left


SIZES = [
    *((jnp.bfloat16, size) for size in (1e-36, 1e-20, 1e-3, 1e3, 1e20, 1e36)),
    (jnp.float16, 1e-3),
    (jnp.float16, 1e3),
]


@pytest.mark.parametrize(("dtype", "size"), SIZES)
def test_keys_of_any_size_keep_their_place(dtype, size):
    """The bound of a sum is between 2**28 and 2**30 units, but for keys so small that no float32 step would do."""
    given = inputs(0)
    given["key"] = jnp.asarray(given["key"] * size, dtype)
    units = units_of(given)
    bound = np.abs(np.asarray(given["key"], np.float64)).max(1)  # [B, K, D]
    most_ds = np.float64(2.0 ** (14 if dtype == jnp.float16 else 2)) * np.asarray(units.rows).max()
    in_units = bound[:, :, None] * most_ds / elements(units)[:, ::2].max(2, keepdims=True)
    assert np.isfinite(np.asarray(units.channels)).all() and (np.asarray(units.channels) > 0).all()
    assert in_units.max() <= 2**30 and (size < 1e-27 or in_units.min() > 2**28)


def test_channels_of_keys_beyond_all_steps_are_nan():
    given = inputs(0)
    given["key"][..., 3] *= 1e38
    units = units_of(given)
    assert np.isnan(units.channels[..., 3]).all() and np.isnan(units.channels).sum() == KV_HEADS
    assert (units.steps().channels[..., 3] == 0).all()


@pytest.mark.parametrize(("outlier", "error"), [(1.0, 1e-6), (100.0, 2e-5)])
def test_the_sum_is_the_same_in_every_order_and_close(outlier, error):
    given = inputs(4, outlier)
    units = units_of(given)
    steps = np.rint(given["terms"] / elements(units)[:, :, :, None]).astype(np.int32)
    total = steps.sum(3, dtype=np.int32)
    shuffled = np.random.default_rng(0).permutation(steps.swapaxes(0, 3)).swapaxes(0, 3).sum(3, dtype=np.int32)
    np.testing.assert_array_equal(total, shuffled)
    exact = given["terms"].sum(3)
    assert np.linalg.norm(total * elements(units) - exact) <= error * np.linalg.norm(exact)
    scaled = given["terms"] * np.asarray(units.steps().rows)[..., None, None]
    channel_steps = np.repeat(np.asarray(units.steps().channels), HEADS // KV_HEADS, axis=1)[:, :, None, None]
    shifted = to_summands(jnp.asarray(scaled), jnp.asarray(channel_steps), interpret=True).sum(3)
    found = units.value(shifted.swapaxes(1, 2), jnp.full((BATCH, TOKENS, HEADS), TOKENS)).swapaxes(1, 2)
    assert np.linalg.norm(found - exact) <= error * np.linalg.norm(exact)


def test_a_row_that_attends_nothing_gets_zero_whatever_its_cotangent_holds():
    given = inputs(0)
    given["lse"][0, 1, 5] = -np.inf
    given["d_out"][0, 5, 1] = np.nan
    units = units_of(given)
    assert units.rows[0, 1, 5] == units.steps().rows[0, 1, 5] == 0
    assert np.isfinite(units.rows).all()


def test_nan_of_a_row_survives_and_stays_in_its_row():
    given = inputs(0)
    given["delta"][0, 2, 9] = np.nan
    units = units_of(given)
    assert np.isnan(units.rows[0, 2, 9])
    assert np.isnan(units.rows).sum() == 1
    assert units.steps().rows[0, 2, 9] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_keys_and_values_that_nobody_attends_to_may_hold_anything(bad):
    """If a query attends to them, its `delta` is not finite."""
    given = inputs(0)
    before = elements(units_of(given))
    given["key"][0, -1], given["value"][0, -1] = bad, bad
    after = elements(units_of(given))
    assert np.isfinite(after).all()
    assert (after <= before).all()
