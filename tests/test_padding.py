"""Empty rows, and padding with any contents: nothing leaks out of padding, nothing becomes NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sweep import sweep

import xsake
from xsake.testing.case import check, check_run, make, run
from xsake.testing.cases import PADDED, padded
from xsake.testing.checks import CHECKS
from xsake.testing.reference import attends


def test_empty_rows_give_zero_and_minus_infinity(implementation):
    CHECKS["rows: empty rows, heads and columns"].run(implementation)


@pytest.mark.parametrize("shape", sweep([(4,), (4, 3)], slow=[(4,)]))
def test_empty_rows_with_sinks_give_their_logsumexp(implementation, shape):
    CHECKS[f"rows: empty rows with sinks {shape}"].run(implementation)


@pytest.mark.slow  # heads without a block are in the first test
def test_nothing_attends_at_all(implementation):
    CHECKS["rows: nothing attends"].run(implementation)


@pytest.mark.slow  # test_predecessor_empty_rows_are_zero has rows that are empty by rule
def test_empty_by_rule_not_by_list(implementation):
    """Rows that have blocks in the list, but whose elements are all excluded by the call's rules."""
    n = implementation.size(75)
    positions = (np.zeros((2, n), np.int32), np.arange(1, n + 1, dtype=np.int32)[None].repeat(2, 0))
    positions[0][:, ::2] = n
    results = check_run(
        implementation, make(implementation, q_len=75, density=1.0, is_causal=True, positions=positions)
    )
    assert (results.out[:, 1::2] == 0).all() and (results.lse[:, 1::2] == -np.inf).all()


@pytest.mark.parametrize(
    "name", sweep([PADDED, "lengths", "segments", "no mask"], slow=["lengths", "segments", "no mask"])
)
@pytest.mark.parametrize("value", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
def test_padding_may_hold_anything(implementation, name, value):
    if value == np.inf and name != PADDED:
        pytest.skip("infinity is tried once")
    CHECKS[f"padding: {value} in {name}"].run(implementation)


def test_nan_cotangents_of_the_lse_of_padding_do_not_leak(implementation):
    case, q_padding, _ = padded(implementation, "lengths")
    d_lse = case.d_lse.copy()
    d_lse[q_padding] = np.nan
    results = run(implementation, case.replace(d_lse=d_lse))
    check(case, results)  # an empty row's lse is a constant


def test_tail_padding_holds_no_values(implementation):
    """Lengths that no block divides, at sizes where memory beyond them is likely to hold what an earlier call left."""
    run(implementation, make(implementation, q_len=127, spread=np.nan, density=1.0))
    case = make(implementation, density=1.0)
    check_run(implementation, case, mask=case.mask_with_room())


def test_nan_stays_in_its_batch_entry_and_heads(implementation):
    """As in dense attention: one bad example must not spoil the others of its batch, nor one head the others."""
    case = make(implementation, mask=(1, 4), density=0.5)
    mask = case.mask_with_room()
    clean = run(implementation, case, mask=mask)
    key, value, query = case.key.copy(), case.value.copy(), case.query.copy()
    key[0, 5, 0] = np.nan  # query heads 0 and 1
    value[1, 7, 1] = np.inf  # query heads 2 and 3
    query[1, 9, 3] = np.nan
    bad = run(implementation, case.replace(key=key, value=value), mask=mask)
    _assert_same_heads(bad, clean, batch=0, heads=[2, 3], kv_heads=[1])
    _assert_same_heads(bad, clean, batch=1, heads=[0, 1], kv_heads=[0])
    bad = run(implementation, case.replace(query=query), mask=mask)
    _assert_same_heads(bad, clean, batch=0, heads=[0, 1, 2, 3], kv_heads=[0, 1])
    _assert_same_heads(bad, clean, batch=1, heads=[0, 1, 2], kv_heads=[0])
    assert np.isnan(bad.out[1, 9, 3]).all() or not attends(case)[1, 3, 9].any()


def _assert_same_heads(found, expected, *, batch, heads, kv_heads):
    for name in ("out", "lse", "d_query", "d_key", "d_value"):
        which = kv_heads if name in ("d_key", "d_value") else heads
        np.testing.assert_array_equal(
            getattr(found, name)[batch][:, which],
            getattr(expected, name)[batch][:, which],
            err_msg=f"{name} of {batch}",
        )


# -- capacity ----------------------------------------------------------------------------------------------------------


def _overflow(implementation):
    """Head 1 of batch 0 needs more than the capacity; the others fit."""
    case = make(implementation, mask=(2, 2), q_heads=2, kv_heads=1, density=0.2)
    blocks = case.blocks.copy()
    blocks[0, 1] = True
    case = case.replace(blocks=blocks)
    return case, int(np.sort(blocks.sum((-2, -1)).ravel())[-2]) + 1


def test_overflow_under_jit_gives_nan(implementation):
    case, capacity = _overflow(implementation)

    @jax.jit
    def call(inputs, blocks):
        def loss(inputs):
            mask = xsake.BlockMask.from_blocks(blocks, **case.sizes, capacity=capacity)
            out, lse = xsake.attention(**inputs, mask=mask, return_lse=True, implementation=implementation.name)
            return out.sum(), (out, lse)

        return jax.grad(loss, has_aux=True)(inputs)

    with implementation.context():
        grads, (out, lse) = jax.tree.map(np.asarray, call(case.inputs, case.blocks))
    assert np.isnan(out[0, :, 1]).all() and np.isnan(lse[0, :, 1]).all()
    assert np.isnan(grads["query"][0, :, 1]).any(), "a truncated gradient must not pass for a right one"
    assert np.isfinite(out[1]).all() and np.isfinite(out[0, :, 0]).all()


def test_overflow_of_a_mask_built_under_jit_and_used_outside(implementation):
    """Outside jit, the mask raises or gives NaN; it never truncates."""
    case, capacity = _overflow(implementation)
    mask = jax.jit(lambda blocks: xsake.BlockMask.from_blocks(blocks, **case.sizes, capacity=capacity))(case.blocks)
    with implementation.context():
        try:
            out = np.asarray(
                xsake.attention(
                    jnp.asarray(case.query),
                    jnp.asarray(case.key),
                    jnp.asarray(case.value),
                    mask,
                    implementation=implementation.name,
                )
            )
        except ValueError as error:
            assert "capacity" in str(error)
        else:
            assert np.isnan(out[0, :, 1]).all()


def test_overflow_raises_when_concrete(implementation):
    case, capacity = _overflow(implementation)
    with pytest.raises(ValueError, match=rf"capacity={capacity} .*batch 0, head 1"):
        case.mask(capacity=capacity)


@pytest.mark.parametrize("capacity", sweep([None, 14], slow=[None]))
def test_indices_out_of_range_under_jit_give_nan(implementation, capacity):
    case = make(implementation, q_len=107, mask=(1, 1), block_q=32, block_kv=32, q_heads=2, kv_heads=1)

    @jax.jit
    def call(indices):
        mask = xsake.BlockMask.from_indices(indices, **case.sizes, capacity=capacity)
        return xsake.attention(case.query, case.key, case.value, mask, implementation=implementation.name)

    good = np.array([[0, -1], [1, 0], [2, 2], [3, -1]], np.int32)
    bad = good.copy()
    bad[1, 1] = 4
    with implementation.context():
        assert np.isfinite(np.asarray(call(good))).all()
        assert np.isnan(np.asarray(call(bad))).all()
