"""`BlockMask.from_token_indices`: what each token chose, exactly, concrete and traced, forward and backward."""

from __future__ import annotations

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_mask import fewer
from hypothesis import given
from sweep import sweep

import xsake
from xsake import BlockMask
from xsake.kernels_xla_ref import oracle


def elements(indices, counts, block_kv, kv_len, is_causal):
    """bool[B, K, T, S] from the definition."""
    b, t, k, n = indices.shape
    counts = np.broadcast_to(n if counts is None else counts, (b, t, k))
    chosen = np.zeros((b, k, t, kv_len), bool)
    for at in np.ndindex(b, t, k):
        for block in indices[at][: counts[at]]:
            if block >= 0:
                chosen[at[0], at[2], at[1], block * block_kv : (block + 1) * block_kv] = True
    return chosen & np.tri(t, kv_len, dtype=bool) if is_causal else chosen


@st.composite
def selections(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    t, kv_len = draw(st.sampled_from([(1, 1), (37, 37), (70, 45)]))
    block_q, block_kv = draw(st.sampled_from([(4, 8), (16, 5), (40, 16)]))
    b, k, n = (draw(st.integers(1, most)) for most in (2, 3, 4))
    most = -(-kv_len // block_kv)
    indices = rng.integers(-1, most, (b, t, k, n))
    if draw(st.booleans()):  # the same for all tokens: whole blocks
        indices = np.broadcast_to(indices[:, :1], indices.shape)
    counts = draw(st.sampled_from([None, 0, 1, "array"]))
    counts = rng.integers(0, n + 2, (b, t, k)) if counts == "array" else counts
    sizes = dict(block_q=block_q, block_kv=block_kv, kv_len=kv_len, is_causal=draw(st.booleans()))
    return indices, counts, sizes


@given(selections())
@fewer
def test_every_token_attends_what_it_chose(drawn):
    indices, counts, sizes = drawn
    expected = elements(indices, counts, sizes["block_kv"], sizes["kv_len"], sizes["is_causal"])
    mask = BlockMask.from_token_indices(indices, counts, **sizes)
    np.testing.assert_array_equal(mask.to_elements(), expected)


@pytest.mark.slow  # the gradients under jit reach it too
@given(selections())
@fewer
def test_traced_masks_are_the_concrete_ones(drawn):
    indices, counts, sizes = drawn
    concrete = BlockMask.from_token_indices(indices, counts, **sizes)
    traced = jax.jit(lambda i, c: BlockMask.from_token_indices(i, c, **sizes))(indices, counts)
    np.testing.assert_array_equal(traced.to_elements(), concrete.to_elements())
    np.testing.assert_array_equal(traced.to_blocks(), concrete.to_blocks())
    assert not traced.overflowed().any()


def test_whole_blocks_need_no_bits():
    indices = np.broadcast_to(np.array([0, 2]), (1, 64, 1, 2))
    mask = BlockMask.from_token_indices(indices, block_q=16, block_kv=16)
    assert mask.bitmaps is None and int(mask.kv_num_full.sum()) == 8


@pytest.mark.parametrize("dtype", sweep(["float32", "bfloat16"], slow=["bfloat16"]))
def test_each_token_its_own_blocks_under_jit(dtype):
    """A selection that no block mask can express, with -1, repeats and empty tokens; grouped heads; all gradients."""
    rng = np.random.default_rng(0)
    b, t, h, k, d = 2, 90, 4, 2, 16
    indices = rng.integers(-1, 6, (b, t, k, 3)).astype(np.int32)
    indices[:, 5], indices[:, 7] = -1, 3
    q, d_out = (jnp.asarray(rng.normal(size=(b, t, h, d)), dtype) for _ in range(2))
    key, value = (jnp.asarray(rng.normal(size=(b, t, k, d)), dtype) for _ in range(2))

    def make(indices):
        return BlockMask.from_token_indices(indices, block_q=16, block_kv=16, is_causal=True)

    def everything(attention, given, make=lambda mask: mask):
        @jax.jit
        def run(q, key, value, given):
            out, vjp = jax.vjp(lambda *x: attention(*x, make(given)), q, key, value)
            return out, *vjp(d_out)

        return [np.asarray(x, np.float32) for x in run(q, key, value, given)]

    tolerance = 2e-5 if dtype == "float32" else 3e-2
    got = everything(xsake.attention, indices, make)
    for one, other in zip(got, everything(oracle.attention, make(indices)), strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance)
    assert (got[0][:, 5] == 0).all(), "a token that chose nothing"


def test_numbers_out_of_range():
    with pytest.raises(ValueError, match=r"block_indices must be -1 \(none\) or in \[0, 4\); got \[4, 4"):
        BlockMask.from_token_indices(np.full((1, 8, 1, 1), 4), block_kv=2)
    x = jnp.ones((1, 8, 1, 16))
    out = jax.jit(lambda i: xsake.attention(x, x, x, BlockMask.from_token_indices(i, block_kv=2)))
    assert np.isnan(out(np.full((1, 8, 1, 1), 4))).all()
    assert np.isfinite(out(np.full((1, 8, 1, 1), 3))).all()


@pytest.mark.parametrize(
    ("indices", "counts", "error", "message"),
    [
        (np.zeros((1, 8, 1, 1)), None, TypeError, "block_indices must be integers"),
        (np.zeros((1, 8, 1), int), None, ValueError, r"block_indices must be \[batch, tokens, heads, blocks\]"),
        (np.zeros((1, 8, 1, 1), int), 1.5, TypeError, "block_counts must be integers"),
        (np.zeros((1, 8, 1, 1), int), np.ones((1, 8), int), ValueError, r"block_counts must be an int or \[1, 8, 1\]"),
    ],
)
def test_wrong_selections_are_refused(indices, counts, error, message):
    with pytest.raises(error, match=message):
        BlockMask.from_token_indices(indices, counts, block_kv=2)
