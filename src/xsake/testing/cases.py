"""The calls that every backend is held to, by group and name: tables of arguments, and cases that need more."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from xsake.testing.case import Case, make
from xsake.testing.target import Target

INT32_MAX = np.iinfo(np.int32).max

MASKS: dict[str, dict[str, Any]] = {
    "one mask for all": dict(mask=(1, 1)),
    "a mask per head": dict(mask=(1, 4)),
    "a mask per kv head": dict(mask=(1, 2)),
    "a mask per batch entry": dict(mask=(2, 1)),
    "a mask per batch entry and head": dict(mask=(2, 4), density=0.3),
    "a mask per batch entry and kv head": dict(mask=(2, 2)),
    "no mask": dict(mask=None),
    "square blocks": dict(block_q=16, block_kv=16, mask=(1, 4)),
    "tall blocks": dict(block_q=32, block_kv=16, mask=(1, 4)),
    "very unequal heads": dict(density=np.array([1.0, 0.05, 0.4, 0.0])[None, :, None, None]),
}

HEADS: dict[str, dict[str, Any]] = {
    "multi query": dict(q_heads=4, kv_heads=1),
    "multi head": dict(q_heads=3, kv_heads=3, mask=(1, 3)),
    "one head": dict(q_heads=1, kv_heads=1, mask=(1, 1), batch=1),
    "group of three": dict(q_heads=6, kv_heads=2, mask=(1, 6)),
    "values wider than keys": dict(head_dim=16, value_dim=40),
    "equal head dims": dict(head_dim=32, value_dim=32),
}

RULES: dict[str, dict[str, Any]] = {
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

LENGTHS: dict[str, dict[str, Any]] = {
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

ARGUMENTS: dict[str, dict[str, Any]] = {
    "scale": dict(scale=0.37),
    "negative scale": dict(scale=-0.2),
    "soft cap": dict(logits_soft_cap=1.5, spread=2.0),
    "soft cap after bias": dict(logits_soft_cap=0.8, bias=(1, 0, 0, 0)),
    "sinks": dict(sinks=(4,)),
    "several sinks per head": dict(sinks=(4, 3), mask_causal=True),
    "sinks far apart, and none": dict(mask=None, sinks=(4,), spread=2.0, q_len=171, kv_len=53, is_causal=True),
}
TABLES = {"masks": MASKS, "heads": HEADS, "rules": RULES, "lengths": LENGTHS, "arguments": ARGUMENTS}


def of_table(target: Target, group: str, name: str) -> Case:
    """The case of a table's row; windows grow with the target's blocks."""
    options = {"density": 0.5} | TABLES[group][name]
    for key in ("mask_window", "local_window_size"):
        if key in options:
            options[key] = _times(options[key], target.unit)
    case = make(target, seed=_seed(group, name), **options)
    if name == "sinks far apart, and none":
        case = case.replace(arguments=case.arguments | {"sinks": np.array([60.0, -60.0, -np.inf, 0.0], np.float32)})
    return case


def _seed(*names: object) -> int:
    """The seed of a case's inputs: the same in every run, and another for each case."""
    return zlib.crc32(repr(names).encode())


def _times(window: Any, unit: int) -> Any:
    if isinstance(window, tuple):
        return tuple(None if w is None else w * unit for w in window)
    return window * unit


def shuffled(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    return np.stack([rng.permutation(length) for _ in range(batch)]).astype(np.int32)


def segments(rng: np.random.Generator, batch: int, length: int, count: int = 3, padding: float = 0.15) -> np.ndarray:
    """Sorted segments with padding scattered among them."""
    ids = np.sort(rng.integers(0, count, (batch, length)), -1)
    return np.where(rng.random((batch, length)) < padding, -1, ids).astype(np.int32)


def bias(target: Target, shape: tuple[int, int, int, int]) -> Case:
    """0 stands for the whole dimension."""
    return make(target, q_len=39, kv_len=70, mask=(2, 2), bias=shape, seed=_seed("bias", shape))


def infinite_bias(target: Target) -> Case:
    case = make(target, mask=(1, 1), bias=(1, 1, 0, 0), sinks=None)
    values = case.arguments["bias"].copy()
    values[..., ::3] = -np.inf
    values[:, :, 5:20] = -np.inf
    return case.replace(arguments={"bias": values})


def segment_ids(target: Target, one_array: bool) -> Case:
    rng = np.random.default_rng(3)
    n = target.size(107)
    q_ids = segments(rng, 2, n)
    ids = q_ids if one_array else (q_ids, segments(rng, 2, n))
    return make(target, density=0.8, segment_ids=ids, mask_causal=one_array)


def any_segment_ids(target: Target) -> Case:
    rng = np.random.default_rng(4)
    ids = rng.choice(np.array([-7, -1, 0, 5, INT32_MAX], np.int32), (2, target.size(75)))
    return make(target, q_len=75, density=0.9, segment_ids=ids)


def lengths_of_both(target: Target) -> Case:
    return make(
        target,
        q_len=75,
        kv_len=140,
        mask=(1, 4),
        sinks=(4,),
        query_seq_lengths=np.array([75 * target.unit, 31], np.int32),
        key_value_seq_lengths=np.array([33, 140 * target.unit], np.int32),
    )


def length_zero(target: Target) -> Case:
    return make(target, q_len=39, mask=None, key_value_seq_lengths=np.array([0, 20], np.int32), is_causal=True)


def positions(target: Target, is_causal: bool, window: Any) -> Case:
    """Reordered tokens, some at the least int32 and some at the largest: rules follow positions and nothing else; the
    mask is built without a rule.
    """
    rng = np.random.default_rng(5)

    def far(x: np.ndarray) -> np.ndarray:  # a TPU keeps the two ends for itself
        return np.where(rng.random(x.shape) < 0.5, x - INT32_MAX, INT32_MAX - 1 - x)

    n, m = target.size(75), target.size(107)
    return make(
        target,
        q_len=75,
        kv_len=107,
        density=0.7,
        is_causal=is_causal,
        local_window_size=window,
        positions=(far(shuffled(rng, 2, n)), far(shuffled(rng, 2, m))),
    )


def positions_and_rule(target: Target) -> Case:
    """Inside blocks, the mask's rule follows positions; blocks that it excludes by index are dropped all the same."""
    n, m = target.size(48), target.size(144)
    q = np.broadcast_to(np.arange(n) + 3, (2, n)).astype(np.int32)
    k = np.broadcast_to(np.arange(m), (2, m)).astype(np.int32)
    return make(target, q_len=48, kv_len=144, density=0.9, mask_causal=True, positions=(q, k))


def chunk_of_a_cache(target: Target) -> Case:
    """Prefill with a cache: query positions start where the cache ends, at a different place in each batch entry."""
    n, m = target.size(37), target.size(150)
    start = np.array([0, 101 * target.unit], np.int32)
    at = (start[:, None] + np.arange(n, dtype=np.int32), np.broadcast_to(np.arange(m, dtype=np.int32), (2, m)))
    rest: dict[str, Any] = dict(is_causal=True, positions=at, key_value_seq_lengths=start + n)
    return make(target, q_len=37, kv_len=150, density=0.8, **rest)


def decode(target: Target, mask: tuple[int, int] | None) -> Case:
    """T = 1 with a cache of which a part is filled."""
    m = target.size(171)
    at = np.array([[40], [133]], np.int32)
    return make(
        target,
        q_len=1,
        kv_len=m,
        exact_lengths=True,
        mask=mask,
        density=0.6,
        is_causal=True,
        local_window_size=(90, 0),
        positions=(at, np.broadcast_to(np.arange(m, dtype=np.int32), (2, m))),
        key_value_seq_lengths=at[:, 0] + 1,
        sinks=(4,),
    )


def everything(target: Target, **options: Any) -> Case:
    rng = np.random.default_rng(8)
    n, m = target.size(75), target.size(107)
    return make(
        target,
        q_len=75,
        kv_len=107,
        mask=(2, 4),
        density=0.7,
        mask_window=(80 * target.unit, 60 * target.unit),
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


def half_precision(target: Target, dtype: str, spread: float) -> Case:
    """Also with sharp softmaxes, where a lost bit of a logit shows."""
    return make(target, dtype=dtype, spread=spread, mask_causal=True, density=0.8)


def beyond_float16(target: Target) -> Case:
    """scale * q leaves float16's range; scale * q.k, and the gradients of small cotangents, do not."""
    case = make(target, dtype="float16", q_len=39, scale=2000.0)

    def times(x: np.ndarray, factor: float) -> np.ndarray:
        return (x.astype(np.float32) * factor).astype(x.dtype)

    case = case.replace(query=times(case.query, 100), key=times(case.key, 1e-5))
    small = 0.01 / target.unit**2  # more tokens, larger gradients
    return case.replace(d_out=times(case.d_out, small), d_lse=times(case.d_lse, small))


def large_logits(target: Target) -> Case:
    return make(target, spread=30.0, **RULES["causal mask, many full blocks"])


def empty_rows(target: Target) -> Case:
    """Rows and heads without a block, and keys that nobody attends."""
    case = make(target, mask=(1, 4), density=0.6)
    blocks = case.blocks.copy()
    blocks[0, 0, 2] = blocks[0, 1] = False
    blocks[0, :, :, 1] = False
    return case.replace(blocks=blocks)


def empty_rows_with_sinks(target: Target, sinks: tuple[int, ...]) -> Case:
    case = make(target, mask=(1, 4), density=0.6, sinks=sinks)
    blocks = case.blocks.copy()
    blocks[0, :, 1] = False
    return case.replace(blocks=blocks)


def nothing_attends(target: Target) -> Case:
    return make(target, q_len=39, density=0.0, bias=(0, 0, 0, 0))


# -- padding -----------------------------------------------------------------------------------------------------------

PADDED = "both, causal, soft cap, bias, sinks"


def padded(target: Target, name: str) -> tuple[Case, np.ndarray, np.ndarray]:
    """A case, and where its queries and its keys are padding."""
    rng = np.random.default_rng(0)
    n, m = target.size(75), target.size(107)
    q_lengths, kv_lengths = np.array([n - 21, n], np.int32), np.array([m, m - 40], np.int32)
    by_length = np.arange(n) >= q_lengths[:, None], np.arange(m) >= kv_lengths[:, None]
    ids = [rng.choice(np.array([-3, -1, 0, 0, 1], np.int32), (2, k)) for k in (n, m)]
    lengths: dict[str, Any] = dict(query_seq_lengths=q_lengths, key_value_seq_lengths=kv_lengths)
    more: dict[str, Any] = dict(segment_ids=tuple(ids), sinks=(4,), bias=(1, 0, 0, 0))
    options, of_queries, of_keys = {
        "lengths": (lengths, *by_length),
        "segments": (more, ids[0] < 0, ids[1] < 0),
        PADDED: (
            lengths | more | dict(is_causal=True, logits_soft_cap=2.0),
            by_length[0] | (ids[0] < 0),
            by_length[1] | (ids[1] < 0),
        ),
        "no mask": (dict(mask=None, key_value_seq_lengths=kv_lengths), np.zeros((2, n), bool), by_length[1]),
    }[name]
    return make(target, q_len=75, kv_len=107, density=0.8, **options), of_queries, of_keys


def poisoned(case: Case, of_queries: np.ndarray, of_keys: np.ndarray, value: float) -> Case:
    """The case with `value` in all padding."""

    def poison(x: np.ndarray, where: np.ndarray) -> np.ndarray:
        x = x.copy()
        x[where] = value
        return x

    return case.replace(
        query=poison(case.query, of_queries),
        key=poison(case.key, of_keys),
        value=poison(case.value, of_keys),
        d_out=poison(case.d_out, of_queries),
    )
