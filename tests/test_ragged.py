"""`xsake.ragged_attention`: every request gets what it gets alone, and wrong numbers are errors or NaN."""

from __future__ import annotations

import contextlib
from functools import cache, partial

import jax
import numpy as np
import pytest
import ragged_case
from cuda_offline import lower
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from ragged_case import Shape
from sweep import sweep

import xsake

SINKS = np.array([0.5, -1.0, 0.0, 2.0], np.float32)
JOINED = Shape(stored_dim=32, packing=2)
APART = Shape()
BLOCKS = Shape(stored_dim=32, packing=2, page=64, pages=5, tokens=400)  # several blocks of keys, several rows
SHORT = Shape(stored_dim=16, page=8, pages=5, tokens=40)  # pages that blocks are no multiple of
# (shape, most queries, batches, options of the oracle)
CASES = {
    "joined": (JOINED, None, 20, dict(window=(20, 0), sinks=SINKS, cap=3.0, scale=0.2)),
    "new tokens": (JOINED, 2, 15, dict(window=(20, 0), sinks=SINKS)),
    "blocks": (BLOCKS, None, 40, dict(window=(100, 0), sinks=SINKS)),
    "blocks, new tokens": (BLOCKS, 2, 25, dict(window=(100, 0))),
    "blocks, plain": (BLOCKS, None, 60, {}),
    "blocks, not causal": (BLOCKS, None, 40, dict(causal=False, window=(90, 40))),
    "joined, plain": (JOINED, None, 20, {}),
    "apart": (APART, None, 30, dict(sinks=SINKS)),
    "not causal": (SHORT, None, 30, dict(causal=False, window=(9, 4))),
    "one new token": (APART, 1, 20, {}),
}
IN_CI = ("joined", "new tokens", "blocks", "blocks, new tokens")


def program(most, *, window=None, sinks=None, cap=None, scale=None, causal=True, **where):
    options = dict(local_window_size=window, sinks=sinks, logits_soft_cap=cap, scale=scale, is_causal=causal)
    return partial(xsake.ragged_attention, most_queries=most, return_lse=True, **options, **where)


@cache
def compiled(name):
    _, most, _, options = CASES[name]
    return jax.jit(program(most, **options))


@pytest.mark.parametrize("name", sweep(list(CASES), slow=[name for name in CASES if name not in IN_CI]))
def test_random_batches(name):
    """Each request gets what it gets alone, to rounding: XLA's program adds blocks in steps, which begin elsewhere."""
    shape, most, batches, options = CASES[name]
    attend = compiled(name)
    for seed in range(batches):
        batch = ragged_case.make(shape, np.random.default_rng(seed), most=most)
        out, lse = map(np.asarray, attend(*batch.arguments()))
        for found, wanted in zip((out, lse), ragged_case.expected(batch, **options), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5, err_msg=f"{seed=}")
        b = seed % shape.requests
        first, end = batch.cu_seqlens[b : b + 2]
        for found, alone in zip((out, lse), attend(*batch.alone(b).arguments()), strict=True):
            own = np.asarray(alone)[: end - first]
            np.testing.assert_allclose(found[first:end], own, rtol=1e-5, atol=1e-6, err_msg=f"{seed=}")


KERNELS = {
    "triton": Shape(tokens=48, requests=3, pages=4, stored_dim=32, packing=2, dtype="bfloat16"),
    "mosaic_tpu": Shape(tokens=48, requests=3, pages=2, page=128, dim=128, stored_dim=128, packing=2, dtype="bfloat16"),
    "mosaic_gpu": Shape(tokens=48, requests=3, pages=2, page=64, dim=64, stored_dim=64, packing=2, dtype="bfloat16"),
}
CHIPS = {"mosaic_gpu": pytest.mark.gpu, "triton": pytest.mark.gpu, "mosaic_tpu": pytest.mark.tpu}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("most", [None, 1])
@pytest.mark.parametrize(
    ("kernels", "interpret"),
    [pytest.param(name, True, marks=pytest.mark.slow, id=f"{name}-interpret") for name in KERNELS]
    + [pytest.param(name, False, marks=mark, id=name) for name, mark in CHIPS.items()],
)
def test_kernels(request, kernels, interpret, most):
    if kernels == "mosaic_tpu" and interpret:
        request.getfixturevalue("strict_tpu_interpreter")
    for seed in range(25):
        apart = {"stored_dim": None} if seed % 5 == 4 else {}
        shape = ragged_case.changed(KERNELS[kernels], **apart)
        batch = ragged_case.make(shape, np.random.default_rng(seed), most=most)
        options = dict(window=(90, 0), sinks=SINKS, cap=3.0) if seed % 2 else {}
        with xsake.interpret() if interpret else contextlib.nullcontext():
            found = program(most, implementation=kernels, **options)(*batch.arguments())
        for x, wanted in zip(found, ragged_case.expected(batch, **options), strict=True):
            np.testing.assert_allclose(np.asarray(x, np.float32), wanted, rtol=0.02, atol=0.02, err_msg=f"{seed=}")


@pytest.mark.parametrize("most", sweep([None, 1], slow=[1]))
@pytest.mark.parametrize("kernels", ["mosaic_gpu", "triton"])
def test_kernels_read_pages_in_place(monkeypatch, kernels, most):
    """Keys and values by turns go to the kernel as they are: nothing else of their size is made."""
    monkeypatch.setattr("xsake._op.registry.unavailable", lambda name, platform: None)
    shape = Shape(tokens=96, requests=4, pages=8, page=64, dim=64, stored_dim=64, packing=2, dtype="bfloat16")
    batch = ragged_case.make(shape, np.random.default_rng(0), most=most)
    text = lower(program(most, implementation=kernels), *batch.arguments())
    size = str(batch.pages.shape[0] * 64) + "x4x64"
    sizes = ("x".join(map(str, batch.pages.shape)), "x".join(map(str, (*batch.pages.shape[:2], 4, 64))), size)
    made = [line for line in text.splitlines() if any(f"-> tensor<{s}xbf16>" in line for s in sizes)]
    assert made and all("stablehlo.reshape" in line or "custom_jvp" in line for line in made), made


def attend(how=None, **changes):
    rng = np.random.default_rng(0)
    query, pages = (rng.standard_normal(shape).astype(np.float32) for shape in ((96, 4, 16), (32, 16, 2, 2, 32)))
    given = dict(query=query, pages=pages) | numbers() | changes
    if how is not None:
        return np.asarray(compiled(how)(*given.values())[0])
    return xsake.ragged_attention(**given)


def numbers(**changes):
    """Numbers of a batch whose requests have 10, 0, 1, 20 and 5 queries."""
    cu = np.array([0, 10, 10, 11, 31, 36], np.int32)
    lengths = np.array([20, 0, 90, 20, 96], np.int32)
    table = np.arange(30, dtype=np.int32).reshape(5, 6)
    return dict(cu_seqlens=cu, kv_lengths=lengths, page_table=table) | changes


def changed(name, at, to):
    x = numbers()[name].copy()
    x[at] = to
    return {name: x}


WRONG = {
    "cu_seqlens must begin with 0; got 1": changed("cu_seqlens", 0, 1),
    "cu_seqlens must not fall; got 10 and then 9 at 2": changed("cu_seqlens", 2, 9),
    "cu_seqlens end at 97, and query has 96 tokens": changed("cu_seqlens", 5, 97),
    r"request 3 has 20 queries and kv_lengths\[3\]=19, fewer than its queries": changed("kv_lengths", 3, 19),
    r"request 4 has 5 queries and kv_lengths\[4\]=97, more than the 96": changed("kv_lengths", 4, 97),
    r"page_table\[2, 5\]=32 must be a page from 0 to 31": changed("page_table", (2, 5), 32),
    r"page_table\[0, 1\]=-1 must be a page from 0 to 31": changed("page_table", (0, 1), -1),
}
OF_REQUEST = {3: 4, 4: 5, 5: 3, 6: 1}  # which request is NaN where the numbers are traced; else all are


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_numbers_are_errors_or_nan(number):
    message, change = list(WRONG.items())[number]
    with pytest.raises(ValueError, match=message):
        attend(**change)
    good, bad = attend("joined"), attend("joined", **change)
    cu = numbers()["cu_seqlens"]
    assert np.isfinite(good).all() and not good[cu[-1] :].any()
    wrong = np.zeros(len(bad), bool)
    if number in OF_REQUEST:
        request = OF_REQUEST[number] - 1
        wrong[cu[request] : cu[request + 1]] = True
    else:
        wrong[: change["cu_seqlens"][-1]] = True  # all but padding
    np.testing.assert_array_equal(np.isnan(bad).any((1, 2)), wrong)
    np.testing.assert_array_equal(bad[~wrong], good[~wrong])


def test_numbers_that_nobody_reads_may_be_anything():
    change = changed("page_table", (3, 2), 99)  # past the length
    change |= {"kv_lengths": changed("kv_lengths", 1, 1 << 30)["kv_lengths"]}  # of a request without queries
    assert np.isfinite(attend("joined", **change)).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(query=np.zeros((4, 2), np.float32)), ValueError, r"query must be \[tokens, heads, head_dim\]"),
        (dict(pages=np.zeros((4, 2), np.float32)), ValueError, r"pages must be a pair \(key, value\), or one array"),
        (dict(pages=np.zeros((4, 16, 3, 16), np.float32)), ValueError, "pages .* need an even number of heads"),
        (dict(pages=np.zeros((4, 16, 4, 8), np.float32)), ValueError, "at least the query's head_dim 16; .* of 8"),
        (dict(pages=(np.zeros((4, 16, 2, 8), np.float32),) * 2), ValueError, "query and key must have one head_dim"),
        (dict(pages=np.zeros((4, 16, 4, 16), np.float16)), ValueError, "must have one dtype"),
        (dict(pages=np.zeros((4, 16, 6, 16), np.float32)), ValueError, "must be divisible by num_kv_heads=3"),
        (dict(cu_seqlens=np.zeros(6, np.float32)), TypeError, "cu_seqlens must be integers, got dtype float32"),
        (dict(kv_lengths=np.zeros(4, np.int32)), ValueError, r"kv_lengths must be \[5\]"),
        (dict(page_table=np.zeros((4, 6), np.int32)), ValueError, r"page_table must be \[5, pages per request\]"),
        (dict(most_queries=0), ValueError, "most_queries=0 must be at least 1"),
        (dict(most_queries=True), TypeError, "most_queries=True must be an int"),
        (dict(implementation="cuda"), ValueError, "implementation='cuda' is unknown"),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_wrong_calls_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        attend(**change)


def test_more_queries_than_said_are_nan():
    out = attend("new tokens")
    cu = numbers()["cu_seqlens"]
    expected = np.zeros(len(out), bool)
    for b in (0, 3, 4):
        expected[cu[b] : cu[b + 1]] = True
    np.testing.assert_array_equal(np.isnan(out).any((1, 2)), expected)


def test_there_is_no_derivative():
    with pytest.raises(NotImplementedError, match="forward only"):
        jax.grad(lambda query: attend(query=query).sum())(np.ones((96, 4, 16), np.float32))


@pytest.mark.slow  # as `test_paged` for one request
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("devices", [2, 4])
def test_devices_take_their_heads(axis_type, devices):
    """Of 4 query heads and 2 K/V heads, whose keys and values lie by turns."""
    rng = np.random.default_rng(0)
    query, pages = (rng.standard_normal(shape).astype(np.float32) for shape in ((96, 4, 16), (32, 16, 4, 16)))
    expected = jax.jit(partial(attend, query=query, pages=pages))()
    mesh = jax.make_mesh((devices,), ("model",), axis_types=(axis_type,), devices=jax.devices()[:devices])
    with jax.set_mesh(mesh):
        cut = (None, "model"), (None, None, "model" if devices == 2 else None)
        placed = [
            jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
            for x, spec in zip((query, pages), cut, strict=True)
        ]
        found = jax.jit(lambda query, pages: attend(query=query, pages=pages))(*placed)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_vmap_maps_over_queries_and_pages():
    rng = np.random.default_rng(0)
    query, pages = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 96, 4, 16), (2, 32, 16, 4, 16)))
    one = jax.jit(lambda query, pages: attend(query=query, pages=pages))
    found = jax.jit(jax.vmap(one))(query, pages)
    for own, *arrays in zip(found, query, pages, strict=True):
        np.testing.assert_allclose(own, one(*arrays), rtol=1e-5, atol=1e-5)
