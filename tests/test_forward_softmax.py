"""The Hopper forward's softmax where logits of later keys are far above those of earlier ones, or far below."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sweep import sweep

import xsake
from xsake.kernels_pallas_gpu.hopper.backend import BackwardConfig, Config, ForwardConfig
from xsake.kernels_xla_ref import oracle

LEVELS = {
    "rising": lambda n: 40.0 * np.arange(n),
    "falling": lambda n: -40.0 * np.arange(n),
    "one peak": lambda n: np.where(np.arange(n) == n - 2, 90.0, 0.0),
    "a little higher": lambda n: 7.0 * np.arange(n),  # below and above the sum that counts as large
}


def inputs(level: str, blocks: int, block: int, heads: tuple[int, int], head_dim: int, dtype: str) -> list[jax.Array]:
    """Query, key and value: the logits of all keys of a block are near the block's level, which halves from query to
    query, down to a quarter.
    """
    rng = np.random.default_rng(0)
    length = blocks * block
    q, k, v = (rng.standard_normal((1, length, n, head_dim)) for n in (heads[0], heads[1], heads[1]))
    q[..., 0] = np.array([1.0, 0.5, 0.25])[np.arange(length) % 3][:, None]
    k[..., 0] = np.repeat(LEVELS[level](blocks), block)[:, None] * head_dim**0.5
    return [jnp.asarray(x, dtype) for x in (q, k, v)]


def check(q: jax.Array, k: jax.Array, v: jax.Array, mask: xsake.BlockMask, config: Any = None, **options) -> None:
    want, want_lse = jax.jit(partial(oracle.attention, return_lse=True, **options))(q, k, v, mask)
    how = dict(implementation="mosaic_gpu", config=config)
    found, lse = xsake.attention(q, k, v, mask, return_lse=True, **options, **how)
    np.testing.assert_allclose(np.asarray(found, np.float32), want, atol=2e-2, rtol=2e-2)
    np.testing.assert_allclose(lse, want_lse, atol=1e-3, rtol=1e-6)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("level", sweep(LEVELS, slow=["rising", "falling", "a little higher"]))
@pytest.mark.parametrize("q_stages", [2, pytest.param(1, marks=pytest.mark.slow)])  # 2: the first tile comes ahead
def test_logits_of_later_blocks_interpreted(level, q_stages):
    q, k, v = inputs(level, 4, 128, (1, 1), 64, "bfloat16")
    mask = xsake.BlockMask.full(128, 512, block_q=64, block_kv=128)
    forward = ForwardConfig(q_stages=q_stages, num_ctas=1)
    with xsake.interpret():
        config = Config(forward=forward, dq=BackwardConfig(), dkv=BackwardConfig())
        check(q[:, :128], k, v, mask, config=config)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("options", [{}, dict(sinks=jnp.full(1, 30.0))])
def test_logits_of_later_blocks_with_values_of_96(options):
    """Their sums are kept by row, not by lane."""
    q, k, v = inputs("a little higher", 4, 128, (1, 1), 64, "float16")
    mask = xsake.BlockMask.full(64, 512, block_q=64, block_kv=128)
    wide = jnp.concatenate([v, v[..., :32]], axis=-1)
    with xsake.interpret():
        check(q[:, :64], k, wide, mask, **options)


@pytest.mark.timeout(240)
def test_a_row_does_not_depend_on_the_rows_beside_it():
    """The second query's logits rise so far that its tile is weighed again; the first query's rise less."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 1, 64)) for n in (64, 256, 256))
    q[..., 0], k[..., 0] = 0.0, 0.0
    q[:, 0, :, 0], k[:, 128:, :, 0] = 1.0, 64.0  # logits of 8
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    mask = xsake.BlockMask.full(64, 256, block_q=64, block_kv=128)
    with xsake.interpret():
        for_small, for_large = (
            xsake.attention(q.at[:, 1, :, 0].set(of_second), k, v, mask, implementation="mosaic_gpu", return_lse=True)
            for of_second in (0.0, 10.0)
        )
    for small, large in zip(for_small, for_large, strict=True):
        np.testing.assert_array_equal(small[:, 0], large[:, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bfloat16"), (128, "bfloat16"), (128, "float16")])
@pytest.mark.parametrize("is_causal", [False, True])
def test_logits_of_later_blocks_on_hopper(level, block, head_dim, dtype, is_causal):
    q, k, v = inputs(level, 24, block, (16, 2), head_dim, dtype)
    length = k.shape[1]
    blocks = np.random.default_rng(1).random((16, 24, 24)) < 0.7
    blocks |= np.eye(24, dtype=bool)
    sizes = dict(block_q=block, block_kv=block, q_len=length, kv_len=length)
    check(q, k, v, xsake.BlockMask.from_blocks(blocks, **sizes, is_causal=is_causal))
