"""The fused Hopper backward in JAX's interpreter, race detection on: a few small cases here, the suite on hardware."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sweep import sweep
from targets import HOPPER_INTERPRETED

import xsake
from xsake.kernels_pallas_gpu.hopper.backend import BackwardConfig, Config, ForwardConfig
from xsake.kernels_pallas_gpu.hopper.fused import plan
from xsake.kernels_pallas_gpu.hopper.fused.plan import FusedConfig
from xsake.kernels_pallas_gpu.hopper.work import parts as tile_parts
from xsake.kernels_pallas_gpu.hopper.work import plan as tile_plan
from xsake.kernels_xla_ref import oracle
from xsake.testing.case import check_run, make

TARGET = dataclasses.replace(HOPPER_INTERPRETED, head_dim=128)
SMALL = dict(batch=1, q_heads=1, kv_heads=1, mask=(1, 1), q_len=32, block_q=16, block_kv=32, density=1.0)

CASES = {
    "causal": (dict(q_len=64, block_q=32, mask_causal=True), FusedConfig()),
    "odd lengths, empty columns": (
        dict(q_len=150, kv_len=300, exact_lengths=True, density=0.4, seed=3),
        FusedConfig(q_stages=3),
    ),
    "early columns of a group in parts": (
        dict(q_len=120, kv_len=250, exact_lengths=True, q_heads=2, mask=(1, 2), density=0.7, seed=1),
        FusedConfig(early=1, parts=2),
    ),
    "bias and float16": (dict(q_len=16, bias=(1, 1, 0, 0), dtype="float16"), FusedConfig()),
    "soft cap, window and sinks": (
        dict(q_len=32, mask_window=(40, 3), sinks=(1,), logits_soft_cap=2.0, deterministic=False),
        FusedConfig(do_stages=3),
    ),
}


def config(fused: FusedConfig) -> Config:
    return Config(forward=ForwardConfig(tile_kv=64, q_stages=1), dq=BackwardConfig(), dkv=BackwardConfig(), fused=fused)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", sweep(CASES, slow=CASES.keys() - {"early columns of a group in parts"}))
def test_smoke(name):
    changes, fused = CASES[name]
    check_run(TARGET, make(TARGET, **(SMALL | changes)), config=config(fused))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("tile", "deterministic"), [(64, True), (128, True), (128, False)])
def test_head_dim_64(tile, deterministic):
    """A tile is 64 queries, of whose dQ each warpgroup multiplies half of the columns, or 128."""
    target = dataclasses.replace(TARGET, head_dim=64)
    case = make(
        target,
        **SMALL | dict(q_len=80, block_q=32, exact_lengths=True, mask_causal=True, deterministic=deterministic),
    )
    check_run(target, case, config=config(FusedConfig(tile=tile)))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", sweep([(True, 100), (True, 128), (False, 128)], slow=[(True, 128), (False, 128)]))
def test_keys_past_the_end_do_not_matter_where_all_logits_are_low(case):
    """exp(0 - lse) of such a key is infinite. With blocks of 256 keys, a tile of 128 lies wholly past the end."""
    fused, keys = case
    rng = np.random.default_rng(0)
    q, k, v, d_out = (jnp.asarray(rng.standard_normal((1, n, 1, 128)), jnp.bfloat16) for n in (64, keys, keys, 64))
    q, k = q.at[..., 0].set(80.0), k.at[..., 0].set(-16.0)  # logits near -113
    mask = xsake.BlockMask.full(64, keys, block_q=64, block_kv=256)
    configured = dataclasses.replace(config(FusedConfig(use=fused)), dq=BackwardConfig(tile=128))

    @partial(jax.jit, static_argnums=0)
    def gradients(attend, *x):
        return jax.vjp(lambda *x: attend(*x, mask), *x)[1](d_out.astype(x[0].dtype))

    want = gradients(oracle.attention, *(x.astype(jnp.float32) for x in (q, k, v)))
    with xsake.interpret():
        found = gradients(partial(xsake.attention, implementation="mosaic_gpu", config=configured), q, k, v)
    for one, other in zip(found, want, strict=True):
        difference = np.asarray(one, np.float32) - np.asarray(other)
        assert np.linalg.norm(difference) <= 2e-2 * np.linalg.norm(other)


EXTREMES = {  # factors of query, key, value and d_out, and the cotangent of lse
    "logits so large that probabilities sum to more than 1": (400.0, 64.0, 0.0, 0.0, 0.99999),
    "keys near the end of float32": (1e-36, 1e36, 1.0, 1e-10, 0.0),
    "keys near the end of float32, and only lse": (1e-37, 1e37, 0.0, 0.0, 1e-9),
    "rows and channels far apart": (1.0, 1e-30, 1e17, 1e17, 0.0),
    "values whose squares overflow": (1.0, 1.0, 1e20, 1e-20, 0.0),
    "values whose squares vanish": (1.0, 1.0, 1e-25, 1.0, 0.0),
    "cotangents whose squares vanish": (1.0, 1.0, 1.0, 1e-25, 0.0),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", sweep(EXTREMES, slow=list(EXTREMES)[1:]))
def test_integers_hold_what_floats_hold(name):
    """dQ as a sum of integers is as close to a sum of floats as bfloat16 is."""
    *factors, d_lse = EXTREMES[name]
    rng = np.random.default_rng(0)
    q, k, v, d_out = (rng.standard_normal((1, n, 1, 64)) for n in (64, 256, 256, 64))
    if "logits" in name:  # equal keys of a mantissa for which a channel's unit is as small as it gets
        q, k = rng.uniform(0.5, 1.0, q.shape), np.full(k.shape, 1.5859375)
    q, k, v, d_out = (jnp.asarray(x * by, jnp.bfloat16) for x, by in zip((q, k, v, d_out), factors, strict=True))
    mask = xsake.BlockMask.full(64, 256, block_q=64, block_kv=128)

    def gradient(deterministic: bool) -> np.ndarray:
        how = dict(implementation="mosaic_gpu", config=config(FusedConfig()), deterministic=deterministic)
        _, pull = jax.vjp(lambda q: xsake.attention(q, k, v, mask, return_lse=True, **how), q)
        return np.asarray(pull((d_out, jnp.full((1, 64, 1), d_lse, jnp.float32)))[0], np.float64)

    with xsake.interpret():
        integers, floats = gradient(True), gradient(False)
    assert np.isfinite(floats).all() and np.abs(floats).max() > 0
    assert np.linalg.norm(integers - floats) <= 2e-3 * np.linalg.norm(floats)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("many", [0.0, 1.0])
@pytest.mark.parametrize("use", [False, True])
def test_pairs_in_sections_or_interleaved(monkeypatch, many, use):
    monkeypatch.setattr(plan, "HOPPER_L2_BYTES", 1)  # a section per pair
    monkeypatch.setattr(tile_plan, "L2_SHARE", 1)
    monkeypatch.setattr(tile_parts, "MANY", many)
    case = make(TARGET, **(SMALL | dict(kv_len=300, exact_lengths=True, kv_heads=2, q_heads=2, mask=(1, 2), seed=1)))
    check_run(TARGET, case, config=config(FusedConfig(use=use)))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_bitmaps():
    case = make(TARGET, **(SMALL | dict(q_len=150, kv_len=200, exact_lengths=True, q_heads=2, mask=(1, 2))))
    chosen = np.random.default_rng(0).random((1, 2, 150, 200)) < 0.5
    check_run(TARGET, case.replace(elements=chosen), config=config(FusedConfig(early=1, parts=2)))


@pytest.mark.slow  # test_mosaic_interpret.py has them: element by element, the kernels are the same
@pytest.mark.timeout(240)
def test_segments_and_positions():
    length = 128
    rng = np.random.default_rng(0)
    case = make(
        TARGET,
        **SMALL,
        is_causal=True,
        segment_ids=np.sort(rng.integers(-1, 2, (1, length)), -1).astype(np.int32),
        positions=rng.permutation(length)[None].astype(np.int32),
    )
    check_run(TARGET, case, config=config(FusedConfig()))
