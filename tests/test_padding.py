"""Empty rows, and padding with any contents: nothing leaks out of padding, nothing becomes NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sweep import sweep

import xsake
from xsake.testing.case import check, check_run, make, run
from xsake.testing.reference import Results, attends


def test_empty_rows_give_zero_and_minus_infinity(implementation):
    case = make(implementation, mask=(1, 4), density=0.6)
    blocks = case.blocks.copy()
    blocks[0, 0, 2] = blocks[0, 1] = False
    blocks[0, :, :, 1] = False  # and keys that nobody attends
    case = case.replace(blocks=blocks)
    results = check_run(implementation, case, mask=case.mask_with_room())
    b = case.block_q
    rows = np.s_[:, 2 * b : 3 * b, 0]
    for index in (rows, np.s_[:, :, 1]):
        assert (results.out[index] == 0).all() and (results.d_query[index] == 0).all()
        assert (results.lse[index] == -np.inf).all()
    keys = np.s_[:, case.block_kv : 2 * case.block_kv]
    assert (results.d_key[keys] == 0).all() and (results.d_value[keys] == 0).all()


@pytest.mark.parametrize("shape", sweep([(4,), (4, 3)], slow=[(4,)]))
def test_empty_rows_with_sinks_give_their_logsumexp(implementation, shape):
    case = make(implementation, mask=(1, 4), density=0.6, sinks=shape)
    blocks = case.blocks.copy()
    blocks[0, :, 1] = False
    case = case.replace(blocks=blocks)
    results = check_run(implementation, case)
    rows = np.s_[:, case.block_q : 2 * case.block_q]
    assert (results.out[rows] == 0).all() and (results.d_query[rows] == 0).all()
    sinks = case.arguments["sinks"].astype(np.float64).reshape(4, -1)
    expected = np.log(np.exp(sinks).sum(-1))
    np.testing.assert_allclose(
        results.lse[rows], np.broadcast_to(expected, results.lse[rows].shape), rtol=1e-6, atol=1e-6
    )


@pytest.mark.slow  # heads without a block are in the first test
def test_nothing_attends_at_all(implementation):
    case = make(implementation, q_len=39, density=0.0, bias=(0, 0, 0, 0))
    results = check_run(implementation, case)
    for name, value in zip(Results._fields, results, strict=True):
        if value is not None:
            assert (value == (-np.inf if name == "lse" else 0)).all(), name


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


def _poisoned(case, q_padding, kv_padding, value):
    """The case with `value` in all padding."""

    def poison(x, where):
        x = x.copy()
        x[where] = value
        return x

    return case.replace(
        query=poison(case.query, q_padding),
        key=poison(case.key, kv_padding),
        value=poison(case.value, kv_padding),
        d_out=poison(case.d_out, q_padding),
    )


def _padded_cases(implementation):
    rng = np.random.default_rng(0)
    n, m = implementation.size(75), implementation.size(107)
    lengths = np.array([n - 21, n], np.int32), np.array([m, m - 40], np.int32)
    by_length = np.arange(n) >= lengths[0][:, None], np.arange(m) >= lengths[1][:, None]
    ids = [rng.choice(np.array([-3, -1, 0, 0, 1], np.int32), (2, k)) for k in (n, m)]
    common = dict(q_len=75, kv_len=107, density=0.8)
    return {
        "lengths": (dict(common, query_seq_lengths=lengths[0], key_value_seq_lengths=lengths[1]), *by_length),
        "segments": (dict(common, segment_ids=tuple(ids), sinks=(4,), bias=(1, 0, 0, 0)), ids[0] < 0, ids[1] < 0),
        "both, causal, soft cap, bias, sinks": (
            dict(
                common,
                segment_ids=tuple(ids),
                query_seq_lengths=lengths[0],
                key_value_seq_lengths=lengths[1],
                is_causal=True,
                logits_soft_cap=2.0,
                sinks=(4,),
                bias=(1, 0, 0, 0),
            ),
            by_length[0] | (ids[0] < 0),
            by_length[1] | (ids[1] < 0),
        ),
        "no mask": (dict(common, mask=None, key_value_seq_lengths=lengths[1]), np.zeros((2, n), bool), by_length[1]),
    }


BOTH = "both, causal, soft cap, bias, sinks"


@pytest.mark.parametrize(
    "name", sweep([BOTH, "lengths", "segments", "no mask"], slow=["lengths", "segments", "no mask"])
)
@pytest.mark.parametrize("value", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
def test_padding_may_hold_anything(implementation, name, value):
    if value == np.inf and name != BOTH:
        pytest.skip("infinity is tried once")
    options, q_padding, kv_padding = _padded_cases(implementation)[name]
    case = make(implementation, **options)
    results = run(implementation, _poisoned(case, q_padding, kv_padding, value))
    # The reference's inputs are clean; cotangents of padding's output do nothing.
    d_out = case.d_out.copy()
    d_out[q_padding] = 0
    check(case.replace(d_out=d_out), results)
    assert (results.out[q_padding] == 0).all() and (results.d_query[q_padding] == 0).all()
    assert (results.d_key[kv_padding] == 0).all() and (results.d_value[kv_padding] == 0).all()


def test_nan_cotangents_of_the_lse_of_padding_do_not_leak(implementation):
    options, q_padding, _ = _padded_cases(implementation)["lengths"]
    case = make(implementation, **options)
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
