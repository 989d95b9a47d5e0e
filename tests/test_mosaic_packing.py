"""Group packing of the Hopper kernels in JAX's interpreter: query blocks of 8, 16 and 32, filled up by heads."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sweep import sweep
from targets import HOPPER, HOPPER_INTERPRETED

import xsake
from xsake._op.arguments import build_call
from xsake.kernels_pallas_gpu.hopper import backend as mosaic
from xsake.kernels_pallas_gpu.hopper.gathered import record as gathered
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import BackwardConfig
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing
from xsake.testing.case import check_run, make

INTERPRETED = dataclasses.replace(HOPPER_INTERPRETED, unit=1)
COMMON = dict(batch=1, block_kv=64, exact_lengths=True, mask=(1, 1), density=0.6)
CASES = {
    "8 queries of 8 heads, a bit per token, sinks": dict(
        q_len=13, kv_len=100, block_q=8, q_heads=8, kv_heads=1, density=1.0, sinks=(8,)
    ),
    "16 queries of 4 heads, two K/V heads, window": dict(
        q_len=37, block_q=16, q_heads=8, kv_heads=2, mask=(1, 2), density=1.0, mask_window=(20, 3)
    ),
    "32 queries of 6 heads, a soft cap, float16": dict(
        q_len=40, block_q=32, q_heads=6, kv_heads=1, logits_soft_cap=2.0, dtype="float16"
    ),
    "8 queries of 16 heads, segments and positions": dict(q_len=24, block_q=8, q_heads=16, kv_heads=1, density=1.0),
    "4 queries of 16 heads, a bit per token, window": dict(
        q_len=11, kv_len=100, block_q=4, q_heads=16, kv_heads=1, density=1.0, local_window_size=(3, 70)
    ),
    "8 queries of 16 heads, causal, a bit per token, many of them": dict(
        q_len=90, block_q=8, q_heads=32, kv_heads=2, mask=(1, 2), density=1.0, is_causal=True
    ),
    "16 queries of 8 heads, odd length, a bit per token": dict(
        q_len=21, block_q=16, q_heads=8, kv_heads=1, density=1.0
    ),
}


def case_of(target, name):
    case = make(target, **(COMMON | CASES[name]))
    rng = np.random.default_rng(0)
    if "a bit per token" in name:
        shape = (1, case.blocks.shape[-3], case.query.shape[1], case.blocks.shape[-1])
        return case.replace(chosen=rng.random(shape) < 0.5)
    if "segments" in name:
        ids = np.sort(rng.integers(0, 3, (1, 24))).astype(np.int32)
        positions = rng.permutation(24)[None].astype(np.int32)
        return case.replace(arguments=case.arguments | dict(segment_ids=ids, positions=positions, is_causal=True))
    return case


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", sweep(CASES, slow=list(CASES)[1:]))
def test_packed_heads(name):
    check_run(INTERPRETED, case_of(INTERPRETED, name))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_packed_heads_on_hopper(name):
    check_run(HOPPER, case_of(dataclasses.replace(HOPPER, unit=1), name))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ctas_that_take_several_packed_tiles(monkeypatch):
    """The interpreter finds races: a slot of the ring is written again while another tile is computed."""
    q, k, v = (jax.random.normal(jax.random.key(h), (1, 192, h, 64), jnp.bfloat16) for h in (16, 1, 1))
    chosen = jax.random.randint(jax.random.key(3), (1, 192, 1, 2), 0, 3)
    mask = xsake.BlockMask.from_token_indices(chosen, block_kv=64, block_q=8, is_causal=True)
    default = mosaic.default_config

    def few(call):
        config = default(call)
        return dataclasses.replace(config, forward=dataclasses.replace(config.forward, num_ctas=2))

    monkeypatch.setattr(mosaic, "default_config", few)
    with xsake.interpret():
        out = xsake.attention(q, k, v, mask, implementation="mosaic_gpu")
    exact = xsake.attention(*(x.astype(jnp.float32) for x in (q, k, v)), mask, implementation="xla")
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=0.03)


@pytest.mark.parametrize(("heads", "row"), [(16, 8 * 8 + 5 * 8 + 2), (8, 4 * 8 + 2 * 8 + 5)])
def test_vectors_go_to_rows_and_back(heads, row):
    """Block 1, the third head of the second group, query 5: by query, or by head."""
    packing = Packing(heads // 2, 8)
    x = np.arange(3 * heads * 24).reshape(3, heads, 24)
    rows = packing.of_heads(jnp.asarray(x))
    assert rows.shape == (3, 2, 3 * packing.rows)
    assert rows[1, 1, row] == x[1, heads // 2 + 2, 8 + 5]
    np.testing.assert_array_equal(packing.to_heads(rows), x)
    tokens = packing.of_tokens(jnp.asarray(x[:, 0]))
    np.testing.assert_array_equal(tokens, packing.of_heads(jnp.broadcast_to(x[:, :1], x.shape))[:, 0])


@pytest.mark.parametrize(
    ("heads", "mask_heads", "block_q", "bias", "reason"),
    [
        ((4, 2), 1, 16, False, "mask.block_q=16 must be a multiple of 64, or a power of two"),
        ((8, 1), 8, 8, False, "and masks for 8"),
        ((8, 1), 1, 4, False, "mask.block_q=4 must be"),
        ((8, 1), 1, 8, True, "where there is a bias"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(heads, mask_heads, block_q, bias, reason):
    q, k = (jnp.ones((1, 64, h, 64), jnp.bfloat16) for h in heads)
    blocks = np.ones((mask_heads, 64 // block_q, 1), bool)
    mask = xsake.BlockMask.from_blocks(blocks, block_q=block_q, block_kv=64, q_len=64, kv_len=64)
    call = build_call(
        q, k, k, mask, default_blocks=(64, 64), bias=jnp.ones((1, 1, 64, 64), jnp.bfloat16) if bias else None
    )
    assert reason in mosaic.unsupported(call)


def test_a_packed_call_has_configurations():
    q, k = (jax.ShapeDtypeStruct((1, 512, h, 128), jnp.bfloat16) for h in (64, 4))
    mask = xsake.BlockMask.from_blocks(np.ones((64, 8), bool), block_q=8, block_kv=64, q_len=512, kv_len=512)
    call = build_call(q, k, k, mask, default_blocks=(64, 64))
    assert mosaic.unsupported(call) is None
    for config in mosaic.search_space(call):
        assert mosaic.misfit(call, config) is None
        assert not config.fused.use
        assert not gathered.wanted(call, config.dkv)  # no bits: whole blocks of queries are read
    wrong = dataclasses.replace(mosaic.default_config(call), dkv=BackwardConfig(gather=True))
    assert "gather=True: the mask must have one bit" in mosaic.misfit(call, wrong)
