"""Values and all gradients of `xsake.attention`, with random cotangents, against float64: every argument."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from sweep import sweep
from targets import TARGETS

from xsake.testing.case import check, check_run, make, run
from xsake.testing.cases import ARGUMENTS, HEADS, LENGTHS, MASKS, RULES
from xsake.testing.checks import CHECKS, HALVES, RULES_OF_POSITIONS


def run_check(implementation, group, name):
    CHECKS[f"{group}: {name}"].run(implementation)


@pytest.mark.parametrize("name", sweep(MASKS, slow=MASKS))  # other tests have such masks
def test_masks(implementation, name):
    run_check(implementation, "masks", name)


@pytest.mark.parametrize("name", sweep(HEADS, slow=HEADS.keys() - {"group of three"}))
def test_heads(implementation, name):
    run_check(implementation, "heads", name)


@pytest.mark.parametrize(
    "name", sweep(RULES, slow=RULES.keys() - {"causal mask, many full blocks", "one-sided windows"})
)
def test_rules(implementation, name):
    run_check(implementation, "rules", name)


@pytest.mark.parametrize("name", sweep(LENGTHS, slow=LENGTHS.keys() - {"length 1"}))
def test_lengths(implementation, name):
    run_check(implementation, "lengths", name)


@pytest.mark.slow
def test_length_1000(implementation):
    case = make(
        implementation,
        q_len=1000,
        exact_lengths=True,
        batch=1,
        q_heads=2,
        kv_heads=1,
        mask=(1, 2),
        block_q=64 // implementation.unit,
        block_kv=64 // implementation.unit,
        density=0.3,
        mask_causal=True,
    )
    check_run(implementation, case)


# It has more queries than keys, too.
@pytest.mark.parametrize("name", sweep(ARGUMENTS, slow=ARGUMENTS.keys() - {"sinks far apart, and none"}))
def test_arguments(implementation, name):
    run_check(implementation, "arguments", name)


BIASES = list(itertools.product((0, 1), repeat=4))
BIASES_IN_CI = [(0, 0, 0, 1)]  # other tests have (0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0) and (1, 1, 1, 0)


@pytest.mark.parametrize("shape", sweep(BIASES, slow=[s for s in BIASES if s not in BIASES_IN_CI]))
def test_bias_broadcasts(implementation, shape):
    """Every combination of whole and broadcast axes. 0 stands for the whole dimension."""
    axes = " x ".join(name if whole == 0 else "1" for name, whole in zip("BHTS", shape, strict=True))
    run_check(implementation, "bias", axes)


def test_bias_of_minus_infinity_masks_elements_and_whole_rows(implementation):
    run_check(implementation, "bias", "-inf masks elements and whole rows")


@pytest.mark.slow  # the next test has padding, too
@pytest.mark.parametrize("name", ["one array", "of queries and of keys"])
def test_segment_ids(implementation, name):
    run_check(implementation, "segments", name)


def test_segment_ids_may_be_any_integers(implementation):
    run_check(implementation, "segments", "any integers")


@pytest.mark.slow  # test_padding.py has lengths of both, too
def test_lengths_of_queries_and_keys(implementation):
    run_check(implementation, "segments", "lengths of queries and keys")


@pytest.mark.slow  # test_transforms.py draws lengths, 0 among them
def test_length_zero(implementation):
    run_check(implementation, "segments", "a length of zero")


@pytest.mark.parametrize("rule", sweep(RULES_OF_POSITIONS, slow=RULES_OF_POSITIONS[:3]), ids=str)
def test_positions(implementation, rule):
    run_check(implementation, "positions", f"is_causal={rule[0]}, window={rule[1]}")


def test_positions_with_the_mask_s_own_rule(implementation):
    run_check(implementation, "positions", "with the mask's own rule")


@pytest.mark.slow  # test_model_transformer.py prefills and decodes with a cache
def test_chunk_of_a_cache(implementation):
    run_check(implementation, "positions", "a chunk of a cache")


@pytest.mark.parametrize("name", sweep(["one token, no mask", "one token"], slow=["one token, no mask"]))
def test_decode_one_token(implementation, name):
    run_check(implementation, "positions", name)


DTYPES = sorted({d for t in TARGETS for d in t.dtypes})


def _needs(implementation, dtype):
    if dtype not in implementation.dtypes:
        pytest.skip(f"{implementation.name} does not claim {dtype}")


@pytest.mark.parametrize("dtype", sweep(DTYPES, slow=["bfloat16", "float16"]))
def test_everything_at_once(implementation, dtype):
    _needs(implementation, dtype)
    run_check(implementation, "dtypes", f"everything at once in {dtype}")


@pytest.mark.parametrize("half", sweep(HALVES, slow=HALVES[:2] + HALVES[3:]), ids=str)  # float16 is in the next test
def test_half_precision(implementation, half):
    dtype, spread = half
    _needs(implementation, dtype)
    run_check(implementation, "dtypes", f"{dtype}, logits times {spread**2:g}")


def test_float32_logits_of_half_precision_inputs_do_not_overflow(implementation):
    _needs(implementation, "float16")
    run_check(implementation, "dtypes", "logits beyond float16")


FULL_BLOCKS = RULES["causal mask, many full blocks"]  # one program for the cases of these blocks


def test_large_logits_do_not_overflow(implementation):
    run_check(implementation, "rows", "large logits")


@pytest.mark.parametrize("rise", sweep([9.0, 3.0], slow=[3.0]))
def test_logits_that_rise_from_block_to_block(implementation, rise):
    """By this many powers of two: kernels may keep an old maximum while the new one is not much larger."""
    case = make(implementation, **FULL_BLOCKS)
    blocks = np.arange(case.key.shape[1]) / case.mask().block_kv
    growth = rise * np.log(2.0) * blocks / 4 * case.key.shape[3] ** 0.5  # times the 4 below, times the scale
    along = np.full(case.key.shape[3], case.key.shape[3] ** -0.5)
    query = (case.query.astype(np.float32) + 4 * along).astype(case.query.dtype)
    key = (case.key.astype(np.float32) + growth[:, None, None] * along).astype(case.key.dtype)
    check_run(implementation, case.replace(query=query, key=key))


@pytest.mark.slow  # every test in float32 would fail, too
def test_float32_means_float32(implementation):
    """TF32 or bfloat16 passes would be wrong by 1e-3."""
    case = make(implementation, q_len=75, mask_causal=True, density=1.0, spread=2.0)
    check(case, run(implementation, case), factor=4.0)
