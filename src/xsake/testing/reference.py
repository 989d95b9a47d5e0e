"""Attention and its gradients in numpy, from the definition, in any precision. Shares no code with the package.

With float64, the results are the truth. With a smaller type, they are those of a plain dense computation in that
precision, from which the yardstick is made: float32 logits and sums, and, for half precisions, weights and results
rounded to the half type.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Results(NamedTuple):
    """All results of a call, as arrays, or a number for each. d_<argument> is the argument's gradient, None where the
    argument is not given.
    """

    out: Any
    lse: Any
    d_query: Any = None
    d_key: Any = None
    d_value: Any = None
    d_bias: Any = None
    d_sinks: Any = None


class Evaluation(NamedTuple):
    """`by_row`: per result that sums over queries and has few elements, each row's summand, [rows, *result's shape]."""

    results: Results
    by_row: dict[str, np.ndarray]


FEW = 32  # the RMS error of so many elements is a good estimate: in 98 cases of 100 within a factor of 1.4


def rule(past: np.ndarray, is_causal: bool, window) -> np.ndarray:
    """Whether the rule allows a pair of tokens; `past` is query position - key position."""
    left, right = window if isinstance(window, tuple) else (window, window)
    ok = np.ones(past.shape, bool)
    if is_causal:
        ok &= past >= 0
    if left is not None:
        ok &= past <= left
    if right is not None:
        ok &= -past <= right
    return ok


def _pair(x):
    return x if isinstance(x, tuple) else (x, x)


def attends(case) -> np.ndarray:
    """bool[B, H, T, S]: whether a query attends to a key, from the contract's definitions."""
    (b, t, h, _), s = case.query.shape, case.key.shape[1]
    a = case.arguments
    ok = np.ones((b, h, t, s), bool)
    q, k = np.arange(t)[None], np.arange(s)[None]
    if a.get("positions") is not None:
        q, k = _pair(a["positions"])
    past = np.asarray(q, np.int64)[:, None, :, None] - np.asarray(k, np.int64)[:, None, None, :]
    if case.blocks is not None:
        m = case.blocks
        rows, columns = np.arange(t) // case.block_q, np.arange(s) // case.block_kv
        # Constructors drop blocks in which the mask's rule, applied to indices, allows no element.
        by_index = rule(np.arange(t)[:, None] - np.arange(s)[None], case.mask_causal, case.mask_window)
        starts = np.arange(0, t, case.block_q), np.arange(0, s, case.block_kv)
        m = m & np.logical_or.reduceat(np.logical_or.reduceat(by_index, starts[0], 0), starts[1], 1)
        heads = np.arange(h) * m.shape[1] // h
        ok &= m[:, heads][:, :, rows][:, :, :, columns]
        if case.chosen is not None:
            ok &= case.chosen[:, np.arange(h) * case.chosen.shape[1] // h][..., columns]
        if case.elements is not None:
            ok &= case.elements[:, np.arange(h) * case.elements.shape[1] // h]
        ok &= rule(past, case.mask_causal, case.mask_window)
    ok &= rule(past, a.get("is_causal", False), a.get("local_window_size"))
    if a.get("query_seq_lengths") is not None:
        ok &= (np.arange(t) < a["query_seq_lengths"][:, None])[:, None, :, None]
    if a.get("key_value_seq_lengths") is not None:
        ok &= (np.arange(s) < a["key_value_seq_lengths"][:, None])[:, None, None, :]
    if a.get("segment_ids") is not None:
        sq, sk = _pair(a["segment_ids"])
        ok &= ((sq[:, :, None] == sk[:, None, :]) & (sq >= 0)[:, :, None] & (sk >= 0)[:, None, :])[:, None]
    return ok


def compute(case, dtype) -> Results:
    """The whole contract for a case, in `dtype`."""
    return evaluate(case, dtype).results


def evaluate(case, dtype) -> Evaluation:
    half = np.dtype(dtype).itemsize < 4
    work = np.dtype(np.float32) if half else np.dtype(dtype)

    def round_(x: np.ndarray) -> np.ndarray:
        return x.astype(dtype).astype(work) if half else x

    def heads_first(x: np.ndarray) -> np.ndarray:
        return np.asarray(x).astype(work).swapaxes(1, 2)

    a = case.arguments
    q, k, v = heads_first(case.query), heads_first(case.key), heads_first(case.value)
    (b, h, _, d), kv_heads = q.shape, k.shape[1]
    k, v = np.repeat(k, h // kv_heads, 1), np.repeat(v, h // kv_heads, 1)
    scale = work.type(d**-0.5 if a.get("scale") is None else a["scale"])
    z = (q @ k.swapaxes(-1, -2)) * scale
    if a.get("bias") is not None:
        z = z + np.asarray(a["bias"]).astype(work)
    slope, x = work.type(1), z
    if a.get("logits_soft_cap") is not None:
        cap = work.type(a["logits_soft_cap"])
        tanh = np.tanh(z / cap)
        x, slope = cap * tanh, 1 - tanh * tanh
    ok = attends(case)
    x = np.where(ok, x, -np.inf).astype(work)
    top = x.max(-1, keepdims=True)
    sinks = None
    if a.get("sinks") is not None:
        sinks = np.asarray(a["sinks"]).astype(work).reshape(h, -1)
        top = np.maximum(top, sinks.max(-1)[None, :, None, None])
    top = np.where(np.isfinite(top), top, 0)
    weight = np.exp(x - top)
    total = weight.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[None, :, None, :] - top).sum(-1, keepdims=True)
    empty = total == 0
    total = np.where(empty, 1, total)
    p = weight / total
    out = round_(round_(p) @ v)
    lse = np.where(empty, -np.inf, top + np.log(total))[..., 0]

    # The weights again, from lse, as implementations do that do not store them: lse's rounding is in the yardstick.
    p = np.exp(np.where(ok & ~empty, x - np.where(empty, 0, lse[..., None]), -np.inf).astype(work))
    d_out = heads_first(case.d_out)
    d_lse = heads_first(case.d_lse[..., None])
    d_p = d_out @ v.swapaxes(-1, -2)
    delta = (d_out * out).sum(-1, keepdims=True) - d_lse
    d_z = p * (d_p - delta) * slope
    group = (b, kv_heads, h // kv_heads)

    def over_group(x: np.ndarray) -> np.ndarray:
        return x.reshape(*group, *x.shape[2:]).sum(2)

    by_row = {}
    d_bias = None
    if a.get("bias") is not None:
        shape = np.shape(a["bias"])
        d_bias = d_z.sum(tuple(i for i in range(4) if shape[i] == 1), keepdims=True).astype(
            np.asarray(a["bias"]).dtype if half else work
        )
        if d_bias.size < FEW:
            rows = d_z.sum(3, keepdims=True) if shape[3] == 1 else d_z
            summed = [i for i in range(3) if shape[i] == 1]
            by_row["d_bias"] = np.moveaxis(rows, summed, range(len(summed))).reshape(-1, *shape)
    d_sinks = None
    if sinks is not None:
        share = np.exp(sinks[None, :, None, :] - np.where(empty, np.inf, lse[..., None]))
        d_sinks = -(share * delta).sum((0, 2)).reshape(np.shape(a["sinks"]))
        if d_sinks.size < FEW:
            by_row["d_sinks"] = -(share * delta).swapaxes(1, 2).reshape(-1, *d_sinks.shape)
    results = Results(
        out=out.swapaxes(1, 2),
        lse=lse.swapaxes(1, 2),
        d_query=round_(round_(d_z) @ k * scale).swapaxes(1, 2),
        d_key=round_(over_group(round_(d_z).swapaxes(-1, -2) @ q) * scale).swapaxes(1, 2),
        d_value=round_(over_group(round_(p).swapaxes(-1, -2) @ d_out)).swapaxes(1, 2),
        d_bias=d_bias,
        d_sinks=d_sinks,
    )
    return Evaluation(results, by_row)


def yardstick(exact: Evaluation, plain: Evaluation) -> Results:
    """The results whose errors set the tolerance: `plain`'s, but for results of few elements

        exact + sqrt(sum over rows of ((plain row - exact row)^2 + addition^2))
        addition = eps / 2 / sqrt(3) * sum of the rows so far

    A result of few elements is a sum over hundreds of rows, whose rounding errors may happen to cancel. Over many
    elements this luck averages out. Over two elements, the RMS error of `plain` is in one case of 17 less than a fourth
    of the error of an equally good computation. The formula is the RMS error over all signs that the rows' errors might
    have had; `addition` is the RMS error of adding a row, which is at most half a unit of the sum so far. Errors within
    a row have a common cause, so that a row counts as one error.
    """
    usual = {}
    for name, rows in exact.by_row.items():
        rounded = plain.by_row[name]
        addition = np.finfo(rounded.dtype).eps / 2 / 3**0.5 * np.cumsum(rows, 0)
        usual[name] = getattr(exact.results, name) + np.sqrt((np.square(rounded - rows) + np.square(addition)).sum(0))
    return plain.results._replace(**usual)


def noise(case, exact: Results) -> Results:
    """Per result: a rounding unit of its own type at its largest value, plus one of float32 at its largest summand."""
    own = {np.dtype(t).itemsize: e for t, e in ((np.float16, 2.0**-10), (np.float32, 2.0**-23), (np.float64, 2.0**-52))}
    unit = 2.0**-7 if case.query.dtype.name == "bfloat16" else own[case.query.dtype.itemsize]
    small = min(unit, 2.0**-23)

    def peak(x) -> float:
        x = np.abs(np.asarray(x).astype(np.float64))
        return float(x[np.isfinite(x)].max()) if np.isfinite(x).any() else 0.0

    q, k, v, do = (peak(x) for x in (case.query, case.key, case.value, case.d_out))
    scale = case.arguments.get("scale") or case.query.shape[-1] ** -0.5
    any_attends = float(attends(case).any())
    d_z = any_attends * (do * v * case.value.shape[-1] + peak(case.d_lse))

    def of(x, summand: float, rounding: float = unit) -> float | None:
        return None if x is None else rounding * peak(x) + small * summand

    return Results(
        out=of(exact.out, 0.0),
        lse=of(exact.lse, abs(scale) * q * k * case.query.shape[-1] * any_attends, small),
        d_query=of(exact.d_query, abs(scale) * d_z * k),
        d_key=of(exact.d_key, abs(scale) * d_z * q),
        d_value=of(exact.d_value, 0.0),
        d_bias=of(exact.d_bias, d_z),
        d_sinks=of(exact.d_sinks, d_z, small),
    )
