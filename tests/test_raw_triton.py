"""The raw Triton kernels: what they serve, which versions they need, and their numbers beside XLA's.

The numbers are compared on a GPU (`pytest -m gpu`), and in Triton's own interpreter (`make compile-gpu`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from raw_triton_offline import make_call

import xsake
from xsake import kernels_raw_triton as raw
from xsake._op import registry
from xsake._op.arguments import build_call
from xsake.kernels_pallas_gpu.hopper import backend as mosaic
from xsake.kernels_pallas_gpu.triton import backend as triton
from xsake.kernels_raw_triton import Tiling, versions

SMALL = {"q_heads": 8, "kv_heads": 2, "dim": 32, "tokens": 130}


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"jax-triton": "0.3.1", "triton": "3.6.0"}, None),
        ({"jax-triton": "0.4.1", "triton": "3.7.0"}, f"jax-triton 0.4.1 does not fit jax {jax.__version__}"),
        ({"jax-triton": "0.3.1", "triton": "3.7.0"}, "triton 3.7.0 does not fit"),
        ({"triton": "3.6.0"}, "jax-triton is not installed"),
    ],
)
def test_versions_that_do_not_fit_are_refused_with_those_that_do(installed, said, monkeypatch):
    monkeypatch.setattr(versions, "_version", installed.get)
    found = versions.misfit(interpreted=False)
    if said is None:
        assert found is None
    else:
        assert said in found and "jax-triton 0.3.1 and triton 3.6" in found and "xsake[triton]" in found


@pytest.fixture
def gpu(any_jax, monkeypatch):
    """Pretend that calls run on a GPU of the given compute capability, with jax-triton or without."""

    def pretend(capability: str, installed: bool = True) -> list[str]:
        for module in (mosaic, triton, raw):
            monkeypatch.setattr(module, "compute_capability", lambda: capability)
        monkeypatch.setattr(versions, "misfit", lambda interpreted: None if installed else "not installed")
        return registry.candidates(None, "gpu")

    return pretend


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9"])
def test_selections_go_to_raw_triton_where_it_is_installed(gpu, capability):
    call = make_call(**SMALL)
    assert registry.choose(gpu(capability), call) == "raw_triton"
    assert registry.choose(gpu(capability, installed=False), call) == "triton"
    dense = build_call(call.query, call.key, call.value, None, default_blocks=raw.default_blocks(130, 130, 32))
    assert registry.choose(gpu(capability), dense) == "triton"


def test_hopper_keeps_its_own_kernels_and_new_gpus_are_refused(gpu):
    assert gpu("9.0")[:2] == ["mosaic_gpu", "raw_triton"]
    assert "raw_triton" not in gpu("7.5") and "raw_triton" not in gpu("10.0")
    with pytest.raises(NotImplementedError, match=r"8\.9, 9\.0; this one has 10\.0"):
        registry.candidates("raw_triton", "gpu")


# -- calls and configurations ------------------------------------------------------------------------------------------


def test_what_is_unsupported_is_named():
    call = make_call(**SMALL)
    assert raw.unsupported(call) is None
    for change, said in (
        ({"block_q": 128}, "block_q=128 must be at most 64"),
        ({"block_kv": 24}, "block_kv=24 must be a multiple of 16"),
    ):
        assert said in raw.unsupported(dataclasses.replace(call, mask=dataclasses.replace(call.mask, **change)))
    assert "head_dim=320" in raw.unsupported(make_call(**SMALL | {"dim": 320}))
    with pytest.raises(NotImplementedError, match="does not honour logits_soft_cap"):
        registry.choose(["raw_triton"], dataclasses.replace(call, soft_cap=2.0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_default_is_in_the_search_space_and_fits(dtype):
    call = make_call(**SMALL | {"dtype": dtype})
    default, space = raw.default_config(call), raw.search_space(call)
    assert default in space and len(set(space)) == len(space)
    assert all(raw.misfit(call, config) is None for config in space)
    wide = dataclasses.replace(default, dq=Tiling(rows=64, kv=128, num_warps=4, num_stages=1))
    assert "dq: a tile of 128 keys" in raw.misfit(call, wide)


def test_it_is_interpreted_only_where_triton_is_told_to_beforehand(any_jax, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with xsake.interpret(), pytest.raises(NotImplementedError, match="TRITON_INTERPRET=1"):
        registry.candidates("raw_triton", "cpu")


# -- numbers -----------------------------------------------------------------------------------------------------------

_NOT_TOLD = os.environ.get("TRITON_INTERPRET") != "1"
RUNS = [
    pytest.param(False, id="gpu", marks=pytest.mark.gpu),
    pytest.param(
        True,
        id="interpreted",
        marks=[
            pytest.mark.interpret,
            pytest.mark.slow,
            pytest.mark.skipif(_NOT_TOLD, reason="Triton interprets with TRITON_INTERPRET=1"),
        ],
    ),
]
CASES: dict[str, dict[str, Any]] = {
    "group 1": dict(heads=(2, 2, 2)),
    "group 4": dict(heads=(8, 2, 2)),
    "group 16, one list": dict(heads=(32, 2, 1)),
    "group 3": dict(heads=(6, 2, 2), dims=(20, 24)),
    "a list per query head": dict(heads=(4, 2, 4)),
    "a window": dict(heads=(8, 2, 2), window=19),
    "a window, sequences, sinks": dict(heads=(4, 1, 1), window=9, sequences=True, sinks=True),
    "sequences": dict(heads=(8, 2, 2), sequences=True),
    "everything chosen": dict(heads=(8, 2, 2), choices="all"),
    "nothing chosen": dict(heads=(8, 2, 2), choices="none"),
    "blocks of 48": dict(heads=(8, 2, 2), block=48),
}


# Interpreted, a step of a loop takes milliseconds.
FEW, MANY = 44, 90


def inputs(
    dtype, heads, tokens=FEW, dims=(16, 32), block=16, choices="some", sequences=False, sinks=False, window=None
):
    """`heads` are query heads, K/V heads, and heads that choose."""
    rng, (h, k, lists) = np.random.default_rng(0), heads
    batch = 1 if sequences else 2
    arrays = [
        jnp.asarray(rng.standard_normal((batch, tokens, n, d)), dtype)
        for n, d in ((h, dims[0]), (k, dims[0]), (k, dims[1]), (h, dims[1]))
    ]
    own = np.arange(tokens)[None, :, None, None] // block
    chosen = rng.integers(-1, own + 1, (batch, tokens, lists, 4))  # with duplicates, and some tokens without any
    chosen[:, 7] = -1
    if choices == "all":
        chosen = np.broadcast_to(np.arange(-(-tokens // block)), (batch, tokens, lists, -(-tokens // block)))
    elif choices == "none":
        chosen = np.full_like(chosen, -1)
    options: dict[str, Any] = {"block_size": block, "window": window}
    if sequences:
        options["cu_seqlens"] = np.array([0, tokens // 4, tokens - 20, tokens], np.int32)
        chosen = np.minimum(chosen, 1)  # blocks of its own sequence
    return arrays, chosen, jnp.asarray(rng.standard_normal(h), jnp.float32) if sinks else None, options


def results(implementation, dtype, case, tokens):
    """Output, lse, and the gradients for random cotangents, in float32."""
    (query, key, value, d_out), chosen, sinks, options = inputs(dtype, tokens=tokens, **CASES[case])
    d_lse = jax.random.normal(jax.random.key(1), query.shape[:3], jnp.float32)

    @jax.jit
    def everything(query, key, value, sinks, chosen):
        def attend(query, key, value, sinks):
            return xsake.selected_attention(
                query, key, value, chosen, sinks=sinks, return_lse=True, implementation=implementation, **options
            )

        found, pull = jax.vjp(attend, query, key, value, sinks)
        return found, pull((d_out, d_lse))

    found = everything(query, key, value, sinks, chosen)
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(found)]


@pytest.mark.parametrize("interpreted", RUNS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_xla(case, dtype, interpreted):
    if interpreted and dtype == "float16" and case not in ("group 4", "a window, sequences, sinks"):
        pytest.skip("these cases are interpreted in bfloat16")
    tokens = FEW if interpreted else MANY
    wanted = results("xla", dtype, case, tokens)
    with xsake.interpret() if interpreted else contextlib.nullcontext():
        found = results("raw_triton", dtype, case, tokens)
    limit = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 5e-3}[dtype]
    for got, want in zip(found, wanted, strict=True):
        largest = np.abs(want[np.isfinite(want)]).max(initial=1.0)
        np.testing.assert_allclose(got, want, rtol=limit, atol=limit * largest)


@pytest.mark.parametrize("interpreted", RUNS)
def test_concrete_choices_and_two_runs_with_the_same_bits(interpreted):
    (query, key, value, d_out), chosen, _, options = inputs("bfloat16", heads=(8, 2, 2))

    def run(implementation):
        def attend(*qkv):
            return xsake.selected_attention(*qkv, chosen, implementation=implementation, **options)

        out, pull = jax.vjp(attend, query, key, value)
        return [np.asarray(x, np.float32) for x in (out, *pull(d_out))]

    with xsake.interpret() if interpreted else contextlib.nullcontext():
        found, again = run("raw_triton"), run("raw_triton")
    for got, same, want in zip(found, again, run("xla"), strict=True):
        np.testing.assert_array_equal(got, same)
        np.testing.assert_allclose(got, want, rtol=3e-2, atol=3e-2 * np.abs(want).max())


@pytest.mark.parametrize("interpreted", RUNS)
@pytest.mark.parametrize(("rows", "heads"), [(16, (16, 1, 1)), (128, (3, 1, 1))])  # of 128 and 192 rows per block
def test_tiles_change_no_number(rows, heads, interpreted):
    (query, key, value, _), chosen, _, options = inputs("float32", heads=heads, block=32)
    tiling = Tiling(rows=rows, kv=16, num_warps=4, num_stages=1)

    def run(**given):
        def attend(*qkv):
            return xsake.selected_attention(*qkv, chosen, **options, **given)

        out, pull = jax.vjp(attend, query, key, value)
        return out, *pull(out)

    with xsake.interpret() if interpreted else contextlib.nullcontext():
        found = run(implementation="raw_triton", config=raw.Config(forward=tiling, dq=tiling, dkv=tiling))
    for got, want in zip(found, run(implementation="xla"), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("interpreted", RUNS)
def test_numbers_out_of_range_give_nan_under_jit(interpreted):
    (query, key, value, _), chosen, _, options = inputs("float32", heads=(4, 2, 2))
    attend = jax.jit(lambda chosen: xsake.selected_attention(query, key, value, chosen, **options, **named))
    named = {"implementation": "raw_triton"}
    with xsake.interpret() if interpreted else contextlib.nullcontext():
        assert not np.isnan(attend(jnp.asarray(chosen))).any()
        assert np.isnan(attend(jnp.asarray(chosen).at[0, 3, 1, 0].set(99))).any()


@pytest.mark.parametrize("interpreted", RUNS)
def test_moba_and_native_sparse_attention_of_the_selected_branch(interpreted):
    (query, key, value, _), _, _, _ = inputs("float32", heads=(4, 2, 2))
    operations = (
        lambda **named: xsake.moba_attention(query, key, value, block_size=16, num_selected=2, **named),
        lambda **named: xsake.native_sparse_attention(query, key, value, block_size=16, num_selected=2, **named),
    )
    for operation in operations:
        with xsake.interpret() if interpreted else contextlib.nullcontext():
            found = operation(implementation="raw_triton")
        np.testing.assert_allclose(found, operation(implementation="xla"), rtol=2e-5, atol=2e-5)
