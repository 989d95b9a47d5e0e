"""Block statistics against dense attention weights."""

from __future__ import annotations

import hads_case as case
import jax
import numpy as np
import pytest

from xsake.hads.calibration.block_statistics import block_statistics


@pytest.mark.parametrize(
    ("length", "block", "block_q", "window"),
    [(96, 16, 16, None), (93, 16, 16, None), (40, 64, 64, None), (203, 16, 16, 70), (203, 16, 32, None)],
)
def test_statistics_are_those_of_dense_weights(length: int, block: int, block_q: int, window: int | None):
    query, key = case.random_inputs(1, length, case.random_profile(), batch=2)
    stats = jax.jit(lambda q, k: block_statistics(q * 2, k, block=block, block_q=block_q, window=window))(query, key)
    weights = case.dense_weights(query * 2, key, window)
    starts = np.arange(0, length, block_q)
    by_block = np.add.reduceat(weights, np.arange(0, length, block), -1)
    for got, power in ((stats.mass, 1), (stats.square, 2)):
        sums = np.add.reduceat(by_block**power, starts, -2)
        wanted = sums / np.minimum(block_q, length - starts)[:, None]
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-7)
    root = np.sqrt(wanted)
    np.testing.assert_allclose(stats.share, root / root.sum(-1, keepdims=True), rtol=2e-5, atol=1e-7)


def test_no_array_is_as_large_as_the_attention_matrix():
    length, block = 4096, 64
    query, key = (jax.ShapeDtypeStruct((1, length, h, 8), np.float32) for h in (2, 1))
    compiled = jax.jit(lambda q, k: block_statistics(q, k, block=block)).lower(query, key).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * length * length * 4 / 4
