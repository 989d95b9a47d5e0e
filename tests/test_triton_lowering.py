"""The Pallas-Triton backend without a GPU: every config lowers for CUDA, and interpretation agrees with the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_offline import lower
from sweep import sweep

import xsake
from xsake._op.arguments import build_call
from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu.triton import backend as triton
from xsake.kernels_pallas_gpu.triton.tiles import Tiling
from xsake.kernels_xla_ref import oracle


def _mask(q_len: int, kv_len: int, block: int, heads: int, *, seed: int = 0, **rule: Any) -> xsake.BlockMask:
    shape = (1, heads, -(-q_len // block), -(-kv_len // block))
    blocks = np.random.default_rng(seed).random(shape) < 0.6
    return xsake.BlockMask.from_blocks(blocks, block_q=block, block_kv=block, q_len=q_len, kv_len=kv_len, **rule)


def _normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def _inputs(b: int, t: int, s: int, h: int, k: int, d: int, dv: int, dtype: Any = jnp.float32) -> tuple:
    return _normal(1, (b, t, h, d), dtype), _normal(2, (b, s, k, d), dtype), _normal(3, (b, s, k, dv), dtype)


def _call(dtype: Any = jnp.bfloat16, dim: int = 64, length: int = 256, block: int = 128, **arguments: Any) -> Call:
    query, key, value = _inputs(1, length, length, 4, 2, dim, dim, dtype)
    mask = _mask(length, length, block, 4, is_causal=True)
    return build_call(query, key, value, mask, default_blocks=(128, 128), **arguments)


def _lower(call: Call, config: triton.Config) -> list[str]:
    """Names of the kernels that the call lowers to for CUDA."""
    with_bias = call.bias is not None

    def both(call: Call) -> tuple:
        out, lse = triton.forward(call, config)
        grads = triton.backward(call, config, lse, lse, out, with_bias=with_bias)
        return out, lse, [g for g in grads if g is not None]

    text = lower(both, call, chip="sm_80")
    assert "xla.gpu.triton" in text
    return [name for name in ("forward", "dq", "dkv", "d_bias") if f'"xsake_triton_{name}"' in text]


SPACES = [("bfloat16", 64), ("float16", 128), ("float32", 64)]


def test_the_search_space_holds_the_default_and_nothing_twice() -> None:
    for dtype, dim in SPACES:
        call = _call(jnp.dtype(dtype), dim)
        space = triton.search_space(call)
        assert triton.default_config(call) in space
        assert len(set(space)) == len(space)


@pytest.mark.slow  # the default configuration is lowered below
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_every_config_of_the_search_space_lowers(space: tuple[str, int]) -> None:
    call = _call(jnp.dtype(space[0]), space[1])
    space = triton.search_space(call)
    # Kernels are lowered apart from one another, and warps and stages are attributes that lowering passes on: what can
    # fail is a kernel at a tile, so each of those is lowered once.
    tilings = {
        kernel: list({(t.q, t.kv): t for t in (getattr(c, kernel) for c in space)}.values())
        for kernel in ("forward", "dq", "dkv")
    }
    for n in range(max(map(len, tilings.values()))):
        config = triton.Config(**{kernel: options[n % len(options)] for kernel, options in tilings.items()})
        assert _lower(call, config) == ["forward", "dq", "dkv"], config


def test_bitmaps_lower() -> None:
    mask = xsake.patterns.from_function(
        256, 256, lambda h, q, k: (q + k) % (h + 2) == 0, of="tokens", heads=4, block_q=64, block_kv=128
    )
    call = dataclasses.replace(_call(), mask=mask)
    assert _lower(call, triton.default_config(call)) == ["forward", "dq", "dkv"]


ARGUMENTS: dict[str, dict[str, Any]] = {
    "tail": {"length": 200, "dim": 80, "segment_ids": np.zeros((1, 200), np.int32), "logits_soft_cap": 5.0},
    "positions": {"positions": np.arange(256)[None], "is_causal": True, "sinks": np.zeros(4, np.float32)},
    "bias": {"bias": np.zeros((1, 1, 256, 256), np.float32)},
    "bias_row": {"bias": np.zeros((1, 4, 1, 256), np.float32)},
    "bias_column": {"bias": np.zeros((1, 4, 256, 1), np.float32)},
    "bias_scalar": {"bias": np.zeros((1, 4, 1, 1), jnp.bfloat16)},
    "bias_row_tail_cap": {
        "length": 200,
        "is_causal": True,
        "bias": np.zeros((1, 4, 1, 200), np.float32),
        "logits_soft_cap": 5.0,
    },
    "window": {"block": 48, "dim": 256, "local_window_size": (30, 7)},
}


@pytest.mark.parametrize(
    "name", sweep(ARGUMENTS, slow=[name for name in ARGUMENTS if name not in ("tail", "bias_row_tail_cap")])
)
def test_every_argument_lowers(name: str) -> None:
    call = _call(**jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, ARGUMENTS[name]))
    kernels = ["forward", "dq", "dkv"]
    if call.bias is not None and call.bias.shape[2:] == (256, 256):
        kernels.append("d_bias")
    assert _lower(call, triton.default_config(call)) == kernels


def test_a_config_is_checked() -> None:
    with pytest.raises(ValueError, match="q=48 must be one of"):
        Tiling(q=48, kv=64, num_warps=4, num_stages=2)
    with pytest.raises(ValueError, match="num_warps=3"):
        Tiling(q=64, kv=64, num_warps=3, num_stages=2)
    call = _call(block=64)
    config = triton.default_config(call)
    wide = dataclasses.replace(config, forward=Tiling(q=128, kv=64, num_warps=4, num_stages=2))
    with pytest.raises(ValueError, match="must divide the mask's block 64 x 64"):
        _lower(call, wide)


def test_what_is_unsupported_is_named() -> None:
    assert triton.unsupported(_call()) is None
    assert "block_q=40" in str(triton.unsupported(_call(block=40)))
    assert "head_dim=513" in str(triton.unsupported(_call(dim=513, length=16)))


def _with_gradients(attend: Callable, arrays: tuple, **differentiable: Any) -> tuple:
    out, pull = jax.vjp(lambda a, d: attend(*a, **d), arrays, differentiable)
    return out, pull(jax.tree.map(lambda x: _normal(9, x.shape, x.dtype), out))


def _triton(*args: Any, **kwargs: Any) -> Any:
    return xsake.attention(*args, implementation="triton", return_lse=True, **kwargs)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch):
    from xsake._op import registry

    monkeypatch.setitem(registry._BACKENDS, "triton", ("xsake.kernels_pallas_gpu.triton.backend", "gpu"))
    with xsake.interpret():
        yield


_SEGMENTS = jnp.asarray(np.sort(np.random.default_rng(5).integers(0, 3, (1, 70)), -1))


@pytest.mark.parametrize(
    ("rule", "arguments", "bias"),
    [
        ({"is_causal": True}, {}, None),
        ({}, {"segment_ids": _SEGMENTS, "logits_soft_cap": 2.0}, (1, 1, 70, 70)),
        ({"local_window_size": (20, 3)}, {"scale": -0.4}, (1, 4, 1, 70)),
        ({}, {"positions": jnp.asarray(np.arange(70, dtype=np.int32)[None, ::-1]), "is_causal": True}, (1, 4, 70, 1)),
    ],
    ids=["causal", "segments", "window", "positions"],
)
@pytest.mark.slow  # the shared suite, interpreted, covers them in CI
def test_parity(rule: dict, arguments: dict, bias: Any, interpreted: None) -> None:
    arrays = _inputs(1, 70, 70, 4, 2, 20, 24)
    mask = _mask(70, 70, 32, 4, **rule)
    extra = {"sinks": _normal(7, (4,))} | ({} if bias is None else {"bias": _normal(8, bias)})

    def run(attend: Callable) -> Any:
        return _with_gradients(lambda q, k, v, **d: attend(q, k, v, mask, **arguments, **d), arrays, **extra)

    got = run(_triton)
    want = run(lambda *a, **k: oracle.attention(*a, return_lse=True, **k))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


def test_neighbours_past_the_end_do_not_leak(interpreted: None) -> None:
    """Batch 1 is NaN: a load past the end of batch 0's arrays, or past its head dimension, would read NaN."""
    arrays = tuple(x.at[1].set(jnp.nan) for x in _inputs(2, 70, 50, 4, 2, 20, 24))
    mask = _mask(70, 50, 32, 4)
    attend = jax.jit(lambda arrays: _with_gradients(lambda q, k, v: _triton(q, k, v, mask), arrays))
    (out, lse), ((dq, dk, dv), _) = attend(arrays)
    for x in (out, lse, dq, dk, dv):
        assert not np.isnan(np.asarray(x[0])).any()
    assert np.isnan(np.asarray(out[1])).any()


@pytest.mark.slow  # test_padding.py has such masks on this backend, interpreted
def test_a_mask_that_overflowed_gives_nan(interpreted: None) -> None:
    q, k, v = _inputs(1, 64, 64, 2, 2, 16, 16)

    @jax.jit
    def attend(blocks: jax.Array) -> jax.Array:
        mask = xsake.BlockMask.from_blocks(blocks, block_q=16, block_kv=16, q_len=64, kv_len=64, capacity=8)
        return _triton(q, k, v, mask)[0]

    few = np.zeros((2, 4, 4), bool)
    few[:, :, 0] = True
    many = few.copy()
    many[1] = True
    assert not np.isnan(np.asarray(attend(jnp.asarray(few)))).any()
    out = np.asarray(attend(jnp.asarray(many)))
    assert np.isnan(out[:, :, 1]).all() and not np.isnan(out[:, :, 0]).any()
