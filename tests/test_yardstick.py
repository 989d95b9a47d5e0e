"""The shared suite's own tolerance: equally good results pass, wrong results do not, however few elements they have."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from targets import TARGETS

from xsake.testing import reference
from xsake.testing.case import Case, check, make
from xsake.testing.compare import assert_close_to_float64

TARGET = next(t for t in TARGETS if t.name == "xla")
HALF = np.dtype(jnp.bfloat16)


def draw(seed: int, **options) -> Case:
    options = dict(q_len=64, kv_len=96, q_heads=2, kv_heads=1, mask=(1, 2), sinks=(2,), dtype="bfloat16") | options
    return make(TARGET, seed=seed, **options)


def d_sinks_rounded_otherwise(case: Case) -> np.ndarray:
    """d_sinks as good as the yardstick's: weights are rounded to the half type before they are divided by their sum."""
    q, k, v, d_out = (np.asarray(x).astype(np.float32).swapaxes(1, 2) for x in _arrays(case))
    sinks = case.arguments["sinks"][None, :, None, None]
    logits = np.where(reference.attends(case), q @ k.swapaxes(-1, -2) * np.float32(q.shape[-1] ** -0.5), -np.inf)
    top = np.maximum(logits.max(-1, keepdims=True), sinks)
    weight = np.exp(logits - top)
    total = weight.sum(-1, keepdims=True) + np.exp(sinks - top)
    out = (weight.astype(HALF).astype(np.float32) @ v / total).astype(HALF).astype(np.float32)
    delta = (d_out * out).sum(-1, keepdims=True) - case.d_lse.swapaxes(1, 2)[..., None]
    return -(np.exp(sinks - top) / total * delta).sum((0, 2, 3))


def _arrays(case: Case) -> tuple[np.ndarray, ...]:
    return case.query, case.key, case.value, case.d_out


def test_equally_good_sums_of_two_elements_pass():
    """The plain errors of two elements are small by luck now and then: as a tolerance they would fail 1 case in 20."""
    times_usual, by_luck = [], 0
    for seed in range(60):
        case = draw(seed)
        exact, plain = reference.evaluate(case, np.float64), reference.evaluate(case, HALF)
        actual = d_sinks_rounded_otherwise(case)
        check(case, plain.results._replace(d_sinks=actual))
        error = actual - exact.results.d_sinks
        times_usual.append(error / (reference.yardstick(exact, plain).d_sinks - exact.results.d_sinks))
        by_luck += np.linalg.norm(error) > 4 * np.linalg.norm(plain.results.d_sinks - exact.results.d_sinks)
    assert by_luck > 0
    assert 0.7 < np.sqrt(np.mean(np.square(times_usual))) < 1.4, "the expected error is the usual one"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("heads", [[0, 1], [1]], ids=["both heads", "one head"])
def test_a_gradient_of_sinks_that_is_off_by_one_percent_fails(dtype, heads):
    case = draw(0, dtype=dtype, bias=(1, 1, 1, 1))
    case = case.replace(d_lse=np.ones_like(case.d_lse))  # else rows cancel, and their rounding is some percent
    plain = reference.compute(case, case.query.dtype)
    check(case, plain)
    wrong = plain.d_sinks.copy()
    wrong[heads] *= 1.01
    with pytest.raises(AssertionError, match=r"^d_sinks: max error [^\n]*$"):
        check(case, plain._replace(d_sinks=wrong))


def test_a_gradient_of_a_broadcast_bias_that_is_off_by_one_percent_fails():
    case = draw(0, dtype="float32", bias=(1, 0, 1, 1))
    plain = reference.compute(case, np.float32)
    with pytest.raises(AssertionError, match=r"^d_bias: max error [^\n]*$"):
        check(case, plain._replace(d_bias=plain.d_bias * np.float32(1.01)))


def test_a_row_left_out_of_the_gradient_of_sinks_fails():
    case = draw(0)
    rows = reference.evaluate(case, HALF).by_row["d_sinks"]
    plain = reference.compute(case, HALF)
    np.testing.assert_allclose(rows.sum(0), plain.d_sinks, rtol=1e-5)
    largest = rows[np.abs(rows).sum(1).argmax()]
    with pytest.raises(AssertionError, match="d_sinks"):
        check(case, plain._replace(d_sinks=plain.d_sinks - largest))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (2, 2, 1, 1)])
def test_rows_add_up_to_the_gradient_of_a_bias(shape):
    case = draw(3, dtype="float32", bias=tuple(0 if n > 1 else 1 for n in shape))
    exact = reference.evaluate(case, np.float64)
    assert exact.results.d_bias.shape == shape
    np.testing.assert_allclose(exact.by_row["d_bias"].sum(0), exact.results.d_bias, rtol=1e-12)


def test_results_of_many_elements_are_judged_by_the_plain_ones():
    case = draw(0, bias=(1, 0, 0, 0))
    plain = reference.evaluate(case, HALF)
    usual = reference.yardstick(reference.evaluate(case, np.float64), plain)
    others = {f: getattr(usual, f) is getattr(plain.results, f) for f in reference.Results._fields}
    assert others == dict.fromkeys(others, True) | {"d_sinks": False}


def test_a_yardstick_that_is_not_finite_is_refused():
    exact = np.ones(3)
    with pytest.raises(AssertionError, match="out: the yardstick is not finite"):
        assert_close_to_float64("out", 2 * exact, exact, np.array([1.0, np.nan, 1.0]), 0.0)
