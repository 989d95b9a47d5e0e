"""Biases that are large, infinite or NaN: they count where an element attends and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
from sweep import sweep

from xsake.testing.case import check_run, make, run
from xsake.testing.reference import Results, attends

SIZES = {"much shorter than the block": 5, "longer than a tile": 100}


@pytest.mark.parametrize("size", sweep(SIZES, slow=["longer than a tile"]))
def test_a_large_bias_broadcast_over_queries_reaches_no_row_of_padding(implementation, size):
    """A row of padding would have weights exp(100), and infinity times its cotangents of 0 is NaN."""
    case = make(
        implementation, q_len=SIZES[size], exact_lengths=True, block_q=128 // implementation.unit, bias=(1, 1, 1, 0)
    )
    bias = np.full_like(case.arguments["bias"], 100)
    check_run(implementation, case.replace(arguments={"bias": bias}))


@pytest.mark.parametrize("soft_cap", sweep([None, 2.0], slow=[None]))
def test_a_bias_of_elements_that_do_not_attend_changes_nothing(implementation, soft_cap):
    """Elements are forbidden by the causal rule, by the mask's window and by segments."""
    lengths = implementation.size(39), implementation.size(70)
    rng = np.random.default_rng(0)
    ids = tuple(rng.integers(0, 2, (2, n)).astype(np.int32) for n in lengths)
    case = _case(
        implementation,
        bias=(0, 0, 0, 0),
        logits_soft_cap=soft_cap,
        is_causal=True,
        mask_window=(20, 7),
        segment_ids=ids,
    )
    _check_same(implementation, case, ~attends(case))


@pytest.mark.parametrize("soft_cap", sweep([None, 2.0], slow=[2.0]))
def test_a_bias_of_keys_that_no_query_attends_changes_nothing(implementation, soft_cap):
    """The bias is broadcast over queries: rows past the last query would attend to these keys."""
    case = _case(implementation, bias=(1, 1, 1, 0), logits_soft_cap=soft_cap, is_causal=True)
    nobody = ~attends(case).any((0, 1, 2), keepdims=True)
    assert nobody.any()
    _check_same(implementation, case, nobody)


def _case(implementation, **arguments):
    return make(implementation, q_len=39, kv_len=70, q_heads=2, kv_heads=1, mask=(1, 2), density=0.8, **arguments)


def _check_same(implementation, case, where):
    clean = check_run(implementation, case)
    for value in (np.nan, np.inf):
        bias = case.arguments["bias"].copy()
        bias[where] = value
        poisoned = run(implementation, case.replace(arguments=case.arguments | {"bias": bias}))
        for name, expected, actual in zip(Results._fields, clean, poisoned, strict=True):
            if expected is not None:
                np.testing.assert_array_equal(actual, expected, err_msg=f"{name} with {value}")
