"""Values and all gradients of `xsake.attention`, with random cotangents, against float64: every argument."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from sweep import sweep
from targets import TARGETS

from xsake.testing.case import check, check_run, make, run

INT32_MAX = np.iinfo(np.int32).max


def shuffled(rng, batch, length):
    return np.stack([rng.permutation(length) for _ in range(batch)]).astype(np.int32)


def segments(rng, batch, length, count=3, padding=0.15):
    """Sorted segments with padding scattered among them."""
    ids = np.sort(rng.integers(0, count, (batch, length)), -1)
    return np.where(rng.random((batch, length)) < padding, -1, ids).astype(np.int32)


MASKS = {
    "one mask for all": dict(mask=(1, 1)),
    "a mask per head": dict(mask=(1, 4)),
    "a mask a kv head": dict(mask=(1, 2)),
    "a mask a batch": dict(mask=(2, 1)),
    "a mask a batch and head": dict(mask=(2, 4), density=0.3),
    "a mask a batch and kv head": dict(mask=(2, 2)),
    "no mask": dict(mask=None),
    "square blocks": dict(block_q=16, block_kv=16, mask=(1, 4)),
    "tall blocks": dict(block_q=32, block_kv=16, mask=(1, 4)),
    "very unequal heads": dict(density=np.array([1.0, 0.05, 0.4, 0.0])[None, :, None, None]),
}

HEADS = {
    "multi query": dict(q_heads=4, kv_heads=1),
    "multi head": dict(q_heads=3, kv_heads=3, mask=(1, 3)),
    "one head": dict(q_heads=1, kv_heads=1, mask=(1, 1), batch=1),
    "group of three": dict(q_heads=6, kv_heads=2, mask=(1, 6)),
    "values wider than keys": dict(head_dim=16, value_dim=40),
    "equal head dims": dict(head_dim=32, value_dim=32),
}

RULES = {
    "causal mask": dict(mask_causal=True),
    "causal mask, many full blocks": dict(mask_causal=True, density=1.0, block_q=16, block_kv=16),
    "causal call on a mask without a rule": dict(is_causal=True),
    "causal without a mask": dict(mask=None, is_causal=True),
    "unaligned window of the mask": dict(mask_window=(37, 11), density=0.9),
    "unaligned window of the call": dict(local_window_size=(21, 6), density=0.8),
    "int window is both sides": dict(mask=None, local_window_size=19),
    "one-sided windows": dict(local_window_size=(None, 5), mask_window=(29, None), density=0.8),
    "causal and window": dict(mask_causal=True, local_window_size=(13, None), density=0.8),
    "window beyond every length": dict(local_window_size=2**31 - 1, mask_window=(2**40, 2**31 - 2), density=0.8),
    "window of nothing but itself": dict(local_window_size=0, density=0.8),
    "window within a block": dict(mask=None, is_causal=True, local_window_size=(3, 0)),
}

LENGTHS = {
    "length 1": dict(q_len=1, exact_lengths=True, density=1.0),
    "length 63, causal": dict(q_len=63, exact_lengths=True, mask_causal=True),
    "length 129": dict(q_len=129, exact_lengths=True),
    "more keys": dict(q_len=53, kv_len=171),
    "more keys, causal": dict(q_len=53, kv_len=171, mask_causal=True),
    "more queries, causal": dict(q_len=171, kv_len=53, is_causal=True, mask=None),
    "one query": dict(q_len=1, kv_len=129, exact_lengths=True),
    "one key": dict(q_len=75, kv_len=1, exact_lengths=True),
    "lengths that are multiples of the block": dict(q_len=96, kv_len=128, mask_causal=True),
}

ARGUMENTS = {
    "scale": dict(scale=0.37),
    "negative scale": dict(scale=-0.2),
    "soft cap": dict(logits_soft_cap=1.5, spread=2.0),
    "soft cap after bias": dict(logits_soft_cap=0.8, bias=(1, 0, 0, 0)),
    "sinks": dict(sinks=(4,)),
    "several sinks a head": dict(sinks=(4, 3), mask_causal=True),
    "sinks far apart, and none": dict(mask=None, sinks=(4,), spread=2.0, q_len=171, kv_len=53, is_causal=True),
}


def _run(implementation, table, name):
    options = dict(table[name])
    density = options.pop("density", 0.5)
    case = make(implementation, seed=len(name), density=density, **options)
    if name == "sinks far apart, and none":
        case = case.replace(arguments=case.arguments | {"sinks": np.array([60.0, -60.0, -np.inf, 0.0], np.float32)})
    return check_run(implementation, case)


@pytest.mark.parametrize("name", sweep(MASKS, slow=MASKS))  # other tests have such masks
def test_masks(implementation, name):
    _run(implementation, MASKS, name)


@pytest.mark.parametrize("name", sweep(HEADS, slow=HEADS.keys() - {"group of three"}))
def test_heads(implementation, name):
    _run(implementation, HEADS, name)


@pytest.mark.parametrize(
    "name", sweep(RULES, slow=RULES.keys() - {"causal mask, many full blocks", "one-sided windows"})
)
def test_rules(implementation, name):
    options = dict(RULES[name])
    for key in ("mask_window", "local_window_size"):  # windows grow with the target's blocks
        if key in options:
            window, unit = options[key], implementation.unit
            options[key] = (
                tuple(None if w is None else w * unit for w in window) if isinstance(window, tuple) else window * unit
            )
    _run(implementation, {name: options}, name)


@pytest.mark.parametrize("name", sweep(LENGTHS, slow=LENGTHS.keys() - {"length 1"}))
def test_lengths(implementation, name):
    _run(implementation, LENGTHS, name)


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
    _run(implementation, ARGUMENTS, name)


BIASES = list(itertools.product((0, 1), repeat=4))
BIASES_IN_CI = [(0, 0, 0, 1)]  # other tests have (0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0) and (1, 1, 1, 0)


@pytest.mark.parametrize("shape", sweep(BIASES, slow=[s for s in BIASES if s not in BIASES_IN_CI]))
def test_bias_broadcasts(implementation, shape):
    """Every combination of whole and broadcast axes. 0 stands for the whole dimension."""
    check_run(
        implementation, make(implementation, q_len=39, kv_len=70, mask=(2, 2), bias=shape, seed=hash(shape) % 1000)
    )


def test_bias_of_minus_infinity_masks_elements_and_whole_rows(implementation):
    case = make(implementation, mask=(1, 1), bias=(1, 1, 0, 0), sinks=None)
    bias = case.arguments["bias"].copy()
    bias[..., ::3] = -np.inf
    bias[:, :, 5:20] = -np.inf
    case = case.replace(arguments={"bias": bias})
    results = check_run(implementation, case)
    assert (results.lse[:, 5:20] == -np.inf).all()


@pytest.mark.slow  # the next test has padding, too
@pytest.mark.parametrize("one_array", [True, False])
def test_segment_ids(implementation, one_array):
    rng = np.random.default_rng(3)
    n = implementation.size(107)
    q_ids = segments(rng, 2, n)
    ids = q_ids if one_array else (q_ids, segments(rng, 2, n))
    results = check_run(implementation, make(implementation, density=0.8, segment_ids=ids, mask_causal=one_array))
    assert (results.out[q_ids < 0] == 0).all()
    assert (results.d_query[q_ids < 0] == 0).all()


def test_segment_ids_may_be_any_integers(implementation):
    rng = np.random.default_rng(4)
    n = implementation.size(75)
    ids = rng.choice(np.array([-7, -1, 0, 5, INT32_MAX], np.int32), (2, n))
    check_run(implementation, make(implementation, q_len=75, density=0.9, segment_ids=ids))


@pytest.mark.slow  # test_padding.py has lengths of both, too
def test_lengths_of_queries_and_keys(implementation):
    case = make(
        implementation,
        q_len=75,
        kv_len=140,
        mask=(1, 4),
        sinks=(4,),
        query_seq_lengths=np.array([75 * implementation.unit, 31], np.int32),
        key_value_seq_lengths=np.array([33, 140 * implementation.unit], np.int32),
    )
    results = check_run(implementation, case)
    assert (results.out[1, 31:] == 0).all() and (results.d_query[1, 31:] == 0).all()
    assert (results.d_key[0, 33:] == 0).all() and (results.d_value[0, 33:] == 0).all()


@pytest.mark.slow  # test_transforms.py draws lengths, 0 among them
def test_length_zero(implementation):
    case = make(implementation, q_len=39, mask=None, key_value_seq_lengths=np.array([0, 20], np.int32), is_causal=True)
    results = check_run(implementation, case)
    assert (results.out[0] == 0).all() and (results.lse[0] == -np.inf).all() and (results.d_query[0] == 0).all()


RULES_OF_POSITIONS = [(True, None), (False, (9, 30)), (True, 25), (False, (9, 2**40))]


@pytest.mark.parametrize("rule", sweep(RULES_OF_POSITIONS, slow=RULES_OF_POSITIONS[:3]), ids=str)
def test_positions(implementation, rule):
    """Reordered tokens, some at the least int32 and some at the largest: rules follow positions and nothing else; the
    mask is built without a rule.
    """
    rng = np.random.default_rng(5)

    def far(x):  # a TPU keeps the two ends for itself
        return np.where(rng.random(x.shape) < 0.5, x - INT32_MAX, INT32_MAX - 1 - x)

    n, m = implementation.size(75), implementation.size(107)
    case = make(
        implementation,
        q_len=75,
        kv_len=107,
        density=0.7,
        is_causal=rule[0],
        local_window_size=rule[1],
        positions=(far(shuffled(rng, 2, n)), far(shuffled(rng, 2, m))),
    )
    check_run(implementation, case)


def test_positions_with_the_mask_s_own_rule(implementation):
    """Inside blocks, the mask's rule follows positions; blocks that it excludes by index are dropped all the same."""
    n, m = implementation.size(48), implementation.size(144)
    q = np.broadcast_to(np.arange(n) + 3, (2, n)).astype(np.int32)
    k = np.broadcast_to(np.arange(m), (2, m)).astype(np.int32)
    check_run(
        implementation, make(implementation, q_len=48, kv_len=144, density=0.9, mask_causal=True, positions=(q, k))
    )


@pytest.mark.slow  # test_model_transformer.py prefills and decodes with a cache
def test_chunk_of_a_cache(implementation):
    """Prefill with a cache: query positions start where the cache ends, at a different place in each batch entry."""
    n, m = implementation.size(37), implementation.size(150)
    start = np.array([0, 101 * implementation.unit], np.int32)
    positions = (start[:, None] + np.arange(n, dtype=np.int32), np.broadcast_to(np.arange(m, dtype=np.int32), (2, m)))
    case = make(
        implementation,
        q_len=37,
        kv_len=150,
        density=0.8,
        is_causal=True,
        positions=positions,
        key_value_seq_lengths=start + n,
    )
    check_run(implementation, case)


@pytest.mark.parametrize("mask", sweep([None, (1, 4)], slow=[None]))
def test_decode_one_token(implementation, mask):
    """T = 1 with a cache of which a part is filled."""
    m = implementation.size(171)
    at = np.array([[40], [133]], np.int32)
    positions = (at, np.broadcast_to(np.arange(m, dtype=np.int32), (2, m)))
    case = make(
        implementation,
        q_len=1,
        kv_len=m,
        exact_lengths=True,
        mask=mask,
        density=0.6,
        is_causal=True,
        local_window_size=(90, 0),
        positions=positions,
        key_value_seq_lengths=at[:, 0] + 1,
        sinks=(4,),
    )
    check_run(implementation, case)


def _everything(implementation, **options):
    rng = np.random.default_rng(8)
    n, m = implementation.size(75), implementation.size(107)
    return make(
        implementation,
        q_len=75,
        kv_len=107,
        mask=(2, 4),
        density=0.7,
        mask_window=(80 * implementation.unit, 60 * implementation.unit),
        bias=(1, 0, 0, 0),
        sinks=(4, 2),
        logits_soft_cap=4.0,
        scale=0.3,
        is_causal=True,
        positions=(shuffled(rng, 2, n), shuffled(rng, 2, m)),
        segment_ids=(segments(rng, 2, n, 2), segments(rng, 2, m, 2)),
        query_seq_lengths=np.array([n - 5, n], np.int32),
        key_value_seq_lengths=np.array([m, m - 9], np.int32),
        **options,
    )


DTYPES = sorted({d for t in TARGETS for d in t.dtypes})


def _needs(implementation, dtype):
    if dtype not in implementation.dtypes:
        pytest.skip(f"{implementation.name} does not claim {dtype}")


@pytest.mark.parametrize("dtype", sweep(DTYPES, slow=["bfloat16", "float16"]))
def test_everything_at_once(implementation, dtype):
    _needs(implementation, dtype)
    check_run(implementation, _everything(implementation, dtype=dtype))


HALVES = [("bfloat16", 1.0), ("float16", 1.0), ("bfloat16", 4.0), ("float16", 4.0)]


@pytest.mark.parametrize("half", sweep(HALVES, slow=HALVES[:2] + HALVES[3:]), ids=str)  # float16 is in the next test
def test_half_precision(implementation, half):
    """Also with sharp softmaxes, where a lost bit of a logit shows."""
    dtype, spread = half
    _needs(implementation, dtype)
    check_run(implementation, make(implementation, dtype=dtype, spread=spread, mask_causal=True, density=0.8))


def test_float32_logits_of_half_precision_inputs_do_not_overflow(implementation):
    """scale * q leaves float16's range; scale * q.k, and the gradients of small cotangents, do not."""
    _needs(implementation, "float16")
    case = make(implementation, dtype="float16", q_len=39, scale=2000.0)

    def times(x, factor):
        return (x.astype(np.float32) * factor).astype(x.dtype)

    case = case.replace(query=times(case.query, 100), key=times(case.key, 1e-5))
    small = 0.01 / implementation.unit**2  # more tokens, larger gradients
    case = case.replace(d_out=times(case.d_out, small), d_lse=times(case.d_lse, small))
    check_run(implementation, case)


FULL_BLOCKS = RULES["causal mask, many full blocks"]  # one program for the cases of these blocks


def test_large_logits_do_not_overflow(implementation):
    results = check_run(implementation, make(implementation, spread=30.0, **FULL_BLOCKS))
    assert np.isfinite(results.out).all()


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
