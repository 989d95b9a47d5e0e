"""Scores of blocks for native sparse attention: the GPU's kernel, interpreted, chooses what XLA chooses."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_offline import lower

from xsake._ground.trace import interpret
from xsake._selection import choose, triton_top_k, triton_weights
from xsake._selection.compressed import compressed_attention

T, H, K, BLOCK = 300, 6, 2, 16


def inputs(d=24, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.standard_normal((2, T, heads, d)), dtype) for heads in (H, K))
    blocks = choose.pooled(key, BLOCK)
    segment = jnp.asarray(np.repeat([[0] * 10 + [1] * 9], BLOCK, 1)[:, :T] * np.ones((2, 1)), jnp.int32)
    return query, blocks, segment


@pytest.mark.parametrize("with_segments", [False, True])
def test_the_kernel_chooses_what_xla_chooses(with_segments):
    query, blocks, segment = inputs()
    segment = segment if with_segments else None
    options = dict(block_size=BLOCK, segment=segment)
    _, lse = compressed_attention(query, blocks, blocks, **options, implementation="xla", scale=0.3)
    pick = partial(choose.choose_blocks, count=5, scale=0.3, by_weight=True, keep_first=True, **options)
    softmax = jax.jit(pick)(query, blocks)
    with_lse = jax.jit(pick)(query, blocks, lse=lse)
    with interpret():
        kernel = jax.jit(pick)(query, blocks, lse=lse)
    assert softmax.shape == (2, T, K, 5)
    np.testing.assert_array_equal(with_lse, softmax)
    np.testing.assert_array_equal(kernel, softmax)


@pytest.mark.parametrize(("n", "count"), [(19, 5), (64, 64), (1, 1)])
def test_top_k_is_xlas(n, count):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-3, 3, (2, 7, n)), jnp.float32)  # many are equal
    x = jnp.where(x == -3, -jnp.inf, x).at[..., 0].set(1.0)
    with interpret():
        best, number = jax.jit(partial(triton_top_k.top_k, count=count))(x)
    expected, place = jax.lax.top_k(x, count)
    np.testing.assert_array_equal(best, expected)
    np.testing.assert_array_equal(jnp.where(best == -jnp.inf, -1, number), jnp.where(expected == -jnp.inf, -1, place))


def test_the_kernels_lower_for_cuda():
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    given = shape((1, 65536, 64, 128)), shape((1, 1024, 4, 128)), jax.ShapeDtypeStruct((1, 65536, 64), jnp.float32)
    lower(partial(triton_weights.group_weights, block_size=64, scale=0.1), *given, chip="sm_90")
    lower(partial(triton_top_k.top_k, count=16), jax.ShapeDtypeStruct((1, 4, 65536, 1000), jnp.float32), chip="sm_80")
