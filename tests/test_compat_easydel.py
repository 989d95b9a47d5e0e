"""`xsake.compat.easydel`: the operation class in every case in which EasyDeL falls back or refuses."""

from __future__ import annotations

import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import normal
from jax.sharding import Mesh
from sweep import sweep

from xsake.compat.easydel import (
    AttentionOutput,
    BlockSparseAttn,
    MaskInfo,
    OperationMetadata,
    OperationRegistry,
    register,
)
from xsake.kernels_xla_ref import oracle

B, T, H, K, D = 2, 50, 4, 2, 16
METADATA = OperationMetadata(blocksize_q=16, blocksize_k=32)


def inputs(t=T, s=T, heads=H, kv_heads=K, value_dim=D, batch=B):
    shapes = ((batch, t, heads, D), (batch, s, kv_heads, D), (batch, s, kv_heads, value_dim))
    return [normal(i, shape) for i, shape in enumerate(shapes)]


def operation(metadata=METADATA) -> BlockSparseAttn:
    return OperationRegistry.create("blocksparse", metadata)


def ones(*shape):
    return jnp.asarray(np.ones(shape, np.float32))


EACH = np.arange(T, dtype=np.int32)[None].repeat(B, 0)
LAST = dict(positions=(jnp.asarray(EACH[:, 30:]), jnp.asarray(EACH)))
ONE = dict(positions=(jnp.asarray(EACH[:, 49:]), jnp.asarray(EACH)))
SEGMENTS = jnp.asarray(np.sort(np.random.default_rng(0).integers(-1, 3, (B, T)), -1), jnp.int32)
CASES = {
    "a length that 128 does not divide": (dict(), dict(), dict(is_causal=True)),
    "not causal": (dict(), dict(causal=False), dict()),
    "one query: decoding": (dict(t=1), dict(), dict(is_causal=True, **ONE)),
    "a chunk of a cache": (dict(t=20), dict(), dict(is_causal=True, **LAST)),
    "another value dim": (dict(value_dim=24), dict(), dict(is_causal=True)),
    "one head is no decoding": (dict(heads=1, kv_heads=1), dict(), dict(is_causal=True)),
    "segments": (
        dict(),
        dict(mask_info=MaskInfo(q_segment_ids=SEGMENTS, kv_segment_ids=SEGMENTS)),
        dict(is_causal=True, segment_ids=SEGMENTS),
    ),
    "window, cap and sinks": (
        dict(),
        dict(
            sliding_window=(9, 0),
            logits_soft_cap=2.0,
            softmax_aux=ones(K, 2),
            softmax_scale=0.5,
        ),
        dict(
            is_causal=True,
            local_window_size=(9, 0),
            logits_soft_cap=2.0,
            sinks=ones(H, 2),
            scale=0.5,
        ),
    ),
}
IN_CI = ["one query: decoding"]


@pytest.mark.parametrize("name", sweep(CASES, slow=[name for name in CASES if name not in IN_CI]))
def test_predecessor_no_fallback(name):
    sizes, options, of_oracle = CASES[name]
    arrays = inputs(**sizes)

    def both(attend):
        return jax.jit(jax.value_and_grad(lambda *x: (attend(*x) ** 2).sum(), argnums=(0, 1, 2)))(*arrays)

    got = both(lambda *x: operation()(*x, **options).attention_outputs)
    wanted = both(lambda *x: oracle.attention(*x, **of_oracle))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), got, wanted)


@pytest.mark.slow
def test_an_attention_mask_is_exact():
    given = np.random.default_rng(1).random((B, 1, T, T)) < 0.5
    out = operation()(*inputs(), mask_info=MaskInfo(attention_mask=given), causal=False).attention_outputs
    bias = jnp.where(given, 0.0, -1e30)
    np.testing.assert_allclose(out, oracle.attention(*inputs(), bias=bias), atol=1e-5)


def test_the_example_of_the_documentation():
    """On a CPU too, where it was to raise."""
    head_dim = D
    metadata = OperationMetadata(
        runtime_dtype=jnp.bfloat16, softmax_scale=1.0 / math.sqrt(head_dim), blocksize_q=256, blocksize_k=512
    )
    attn = BlockSparseAttn(metadata)
    arrays = inputs(t=128, s=128)
    output = attn(*arrays, causal=True)
    assert isinstance(output, AttentionOutput) and output.attention_weights is None
    assert output.attention_outputs.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        output.attention_outputs.astype(jnp.float32), oracle.attention(*arrays, is_causal=True), atol=5e-2
    )
    assert attn.get_impl_metadata() is metadata and BlockSparseAttn.get_impl_name() == "blocksparse"
    assert OperationRegistry.get("blocksparse") is BlockSparseAttn


@pytest.mark.slow
def test_every_forward_method_runs():
    arrays = inputs()
    expected = operation().forward_native(*arrays).attention_outputs
    for platform in ("cpu", "gpu", "cuda", "rocm", "tpu"):
        out = getattr(operation(), f"forward_{platform}")(*arrays).attention_outputs
        np.testing.assert_array_equal(out, expected)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [dict(dp=2, tp=2), dict(dp=2, sp=4), dict(tp=4, sp=2)])
def test_over_the_mesh_of_the_metadata(axes):
    mesh = Mesh(np.array(jax.devices()[: math.prod(axes.values())]).reshape([*axes.values()]), [*axes])
    metadata = OperationMetadata(blocksize_q=16, blocksize_k=16, mesh=mesh)
    arrays = inputs(t=64, s=64)
    out = operation(metadata)(*arrays, sliding_window=(40, 0)).attention_outputs
    expected = oracle.attention(*arrays, is_causal=True, local_window_size=(40, 0))
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert len(out.sharding.device_set) == math.prod(axes.values())
    given = np.random.default_rng(1).random((B, 1, 64, 64)) < 0.5
    out = operation(metadata)(*arrays, attention_mask=given, causal=False).attention_outputs
    np.testing.assert_allclose(out, oracle.attention(*arrays, bias=jnp.where(given, 0.0, -1e30)), atol=1e-5)


REFUSED = {
    "cache_metadata": (dict(cache_metadata=object()), "cache_metadata: not honoured here"),
    "unknown": (dict(dropout_rng=1, deterministic=None), "dropout_rng: not honoured here"),
    "twice": (dict(attention_mask=np.ones((T, T), bool), mask_info=MaskInfo(attention_mask=1)), "given twice"),
    "mask": (dict(attention_mask=np.ones((3, T))), "attention_mask must be boolean or integer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_are_refused_by_name(name):
    options, message = REFUSED[name]
    with pytest.raises((NotImplementedError, ValueError, TypeError), match=message):
        operation()(*inputs(), **options)


def test_wrong_metadata_and_names():
    with pytest.raises(ValueError, match="blocksize_q=0 must be an int of at least 1"):
        OperationMetadata(blocksize_q=0)
    with pytest.raises(ValueError, match=r"operation 'flash' is unknown; it must be one of \['blocksparse'\]"):
        OperationRegistry.get("flash")


def test_registering_without_easydel_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "easydel", None)
    with pytest.raises(ModuleNotFoundError, match=r"EasyDeL, in which register\(\) enters xsake, is not installed"):
        register()
