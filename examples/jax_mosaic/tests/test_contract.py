"""The adapter does what XSAKE's contract says, around JAX's kernel or, without a Hopper GPU, around its reference."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax_mosaic import backend

import xsake
from xsake.testing import assert_holds, checks_of, target_of

xsake.register_backend("jax_mosaic", "jax_mosaic.backend")  # also where the package is not installed
if backend.unavailable() is not None:
    sys.path.append(str(Path(__file__).parent))
    import stand_in

    stand_in.put_in_place()
TARGET = target_of("jax_mosaic")


@pytest.mark.parametrize(
    "check", checks_of(TARGET, quick=os.environ.get("XSAKE_CHECKS") != "all"), ids=lambda check: check.title
)
def test_contract(check):
    assert_holds(TARGET, check)


def call(dtype="float16", dim=64, **options):
    return xsake.attention(*jnp.zeros((3, 1, 96, 2, dim), dtype), implementation="jax_mosaic", **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(dtype="bfloat16"), "computes in float16"),
        (dict(local_window_size=8), "no windows"),
        (dict(dim=128), "scale=0.08839 is no power of two"),
        (dict(dim=128, scale=0.125), "one more is needed to leave out the keys"),
        (dict(dim=192, scale=1.0, is_causal=True), "heads have 192 channels; 128 at most"),
        (dict(mask=xsake.patterns.sliding_window(96, 96, window=16, block_q=16, block_kv=16)), "no windows"),
        (
            dict(mask=xsake.patterns.random(96, 96, density=0.2, seed=0, block_q=16, block_kv=16)),
            "may leave out blocks",
        ),
        (dict(logits_soft_cap=2.0), "does not honour logits_soft_cap"),
    ],
)
def test_what_is_refused(options, says):
    with pytest.raises(NotImplementedError, match=says):
        call(**options)


def test_a_traced_mask_that_leaves_out_a_block_gives_nan():
    blocks = jnp.ones((6, 6), bool)
    sizes = dict(block_q=16, block_kv=16, q_len=96, kv_len=96, capacity=36, density_hint=1.0)
    attend = jax.jit(lambda blocks: call(mask=xsake.BlockMask.from_blocks(blocks, **sizes)))
    assert not jnp.isnan(attend(blocks)).any()
    assert jnp.isnan(attend(blocks.at[3, 4].set(False))).all()


def test_gradients_of_causal_calls_are_refused():
    with pytest.raises(NotImplementedError, match="no gradients of causal calls"):
        jax.grad(lambda query: xsake.attention(query, query, query, is_causal=True, implementation="jax_mosaic").sum())(
            jnp.zeros((1, 96, 2, 64), "float16")
        )


def test_a_scale_that_float16_rounds(monkeypatch):
    monkeypatch.setenv("JAX_MOSAIC_ROUNDS", "1")
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 128, 2, 24)).astype("float16")
    found, right = (
        xsake.attention(query, key, value, return_lse=True, is_causal=True, implementation=name)
        for name in ("jax_mosaic", "xla")
    )
    out, lse = (float(jnp.abs(a.astype("float32") - b).max()) for a, b in zip(found, right, strict=True))
    assert out < 2e-3 and 1e-5 < lse < 2e-3


def test_a_row_without_a_cotangent_keeps_that_of_its_lse():
    """JAX's kernel takes delta as a product with the cotangent."""
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 96, 2, 64)).astype("float16")

    def of_lse(query, implementation):
        return xsake.attention(query, key, value, return_lse=True, implementation=implementation)[1].sum()

    found, right = (jax.jit(jax.grad(of_lse), static_argnums=1)(query, name) for name in ("jax_mosaic", "xla"))
    assert jnp.abs(found - right).max() < 2e-3 * jnp.abs(right).max()
