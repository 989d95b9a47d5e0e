"""The lists of a traced mask equal the lists of the same mask built from numpy."""

from __future__ import annotations

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_mask import LISTS
from hypothesis import given

from xsake import BlockMask
from xsake.hads.mask.lists.compact import compact


def build(blocks, length: int, causal: bool, capacity: int | None) -> BlockMask:
    return BlockMask.from_blocks(
        blocks, block_q=16, block_kv=16, q_len=length, kv_len=length, is_causal=causal, capacity=capacity
    )


_traced = jax.jit(build, static_argnames=("length", "causal", "capacity"))


@given(st.integers(0, 2**32 - 1), st.sampled_from([(100, True), (1030, False)]), st.sampled_from([0.0, 0.3, 1.0]))
def test_traced_lists_are_the_concrete_ones(seed: int, shape: tuple[int, bool], density: float):
    length, causal = shape
    n = -(-length // 16)
    blocks = np.random.default_rng(seed).random((2, 3, n, n)) < density
    traced, concrete = _traced(blocks, length, causal, n * n), build(blocks, length, causal, n * n)
    for name in LISTS:
        assert np.array_equal(getattr(traced, name), getattr(concrete, name)), name


def test_what_does_not_fit_is_counted():
    active = jnp.ones((1, 2, 3, 40), bool)
    indices, row_ptr, num_full = compact(active, np.zeros((3, 40), bool), 50)
    assert row_ptr.tolist() == [[[0, 40, 80, 120]] * 2] and num_full.sum() == 0
    assert indices.tolist() == [[[*range(40), *range(10)]] * 2]


def test_lists_beyond_32_bits_are_refused():
    active = jax.ShapeDtypeStruct((64, 32, 2, 2), bool)
    with pytest.raises(ValueError, match=r"64 x 32 lists of 2000000 blocks are more than 2\*\*31 slots"):
        jax.eval_shape(lambda a: compact(a, np.zeros((2, 2), bool), 2_000_000), active)
