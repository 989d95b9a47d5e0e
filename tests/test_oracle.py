"""The dense oracle against the tests' own numpy reference, in float64: two independent readings of the contract."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from sweep import sweep
from targets import TARGETS

from xsake.kernels_xla_ref import oracle
from xsake.testing import reference
from xsake.testing.case import make, with_grads

T, S = 37, 50
RNG = np.random.default_rng(0)
PERMUTED = tuple(np.stack([RNG.permutation(n) for _ in range(2)]).astype(np.int32) for n in (T, S))
IDS = tuple(RNG.integers(-1, 2, (2, n)).astype(np.int32) for n in (T, S))

CASES = {
    "plain": dict(mask=None),
    "mask": dict(mask=(2, 4), mask_causal=True, density=0.6),
    "kv head mask, window": dict(mask=(1, 2), mask_window=(9, 20), density=0.6),
    "window": dict(mask=None, local_window_size=7),
    "causal, positions": dict(mask=(1, 4), is_causal=True, positions=PERMUTED),
    "segments, sinks": dict(mask=(1, 1), segment_ids=IDS, sinks=(4, 3)),
    "lengths, bias, cap": dict(
        mask=(1, 4),
        query_seq_lengths=np.array([20, T], np.int32),
        key_value_seq_lengths=np.array([S, 11], np.int32),
        bias=(1, 0, 1, 0),
        logits_soft_cap=1.5,
        scale=0.4,
        sinks=(4,),
    ),
}


@pytest.mark.parametrize("name", sweep(CASES, slow=["plain", "mask", "window"]))
def test_oracle_is_the_reference(name):
    case = make(TARGETS[0], q_len=T, kv_len=S, exact_lengths=True, block_q=8, block_kv=16, **CASES[name])
    with jax.enable_x64(True):
        mask, rest = case.mask(), jax.tree.map(lambda x: np.asarray(x, np.int64), case.rest)

        @jax.jit  # operation by operation, every case compiled seventy programs
        def run(inputs, cotangents):
            return with_grads(
                lambda x: oracle.attention(**x, mask=mask, **rest, **case.options, return_lse=True), inputs, cotangents
            )

        given = {k: np.asarray(v, np.float64) for k, v in case.inputs.items()}
        (out, lse), grads = run(given, (case.d_out.astype(np.float64), case.d_lse.astype(np.float64)))
        actual = reference.Results(
            *(np.asarray(x) for x in (out, lse)), **{f"d_{k}": np.asarray(v) for k, v in grads.items()}
        )
    for field, a, e in zip(reference.Results._fields, actual, reference.compute(case, np.float64), strict=True):
        if a is not None:
            assert a.dtype == np.float64, field
            np.testing.assert_allclose(a, e, rtol=1e-10, atol=1e-10, err_msg=field)
