"""Few queries against many keys: the mask row in parts, merged, gives what the whole row gives."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_offline import lower
from sweep import sweep
from targets import HOPPER_INTERPRETED, XLA

import xsake
from xsake._op import registry
from xsake._op.arguments import build_call
from xsake._rewrites.few_queries import FewQueries, RowParts
from xsake.kernels_pallas_gpu.hopper import backend as mosaic
from xsake.kernels_pallas_gpu.lists import merge
from xsake.testing.case import check_run, make

CASES = {
    "one query, one mask": dict(q_len=1, mask=(1, 1), density=1.0),
    "a mask a head, sinks": dict(q_len=3, mask=(2, 4), sinks=(4,)),
    "causal by position, a window, lengths": dict(
        q_len=5,
        mask=(2, 2),
        is_causal=True,
        local_window_size=(150, 0),
        positions=(np.array([[195], [120]]) + np.arange(5), np.arange(300)[None] + np.zeros((2, 1), int)),
        key_value_seq_lengths=np.array([200, 125], np.int32),
    ),
    "nothing attends": dict(q_len=2, mask=(1, 1), density=0.0, sinks=(4,)),
}


def few(name):
    return make(XLA, kv_len=300, block_q=8, block_kv=16, **CASES[name])


@pytest.mark.parametrize("name", sweep(CASES, slow=["one query, one mask", "a mask a head, sinks", "nothing attends"]))
def test_parts_give_the_whole(name):
    case = few(name)
    call = build_call(**case.inputs, **case.rest, **case.options, mask=case.mask(), default_blocks=(8, 16))
    xla = registry.get("xla")
    group = 1 if call.mask.heads == 4 else 2

    @jax.jit
    def in_parts(call):
        cut = FewQueries(call, RowParts(group, 16, 7))
        parts = xla.forward(cut.call, xla.default_config(cut.call))
        return cut.results(*parts), merge.merged(cut, *parts)

    expected = jax.jit(lambda call: xla.forward(call, xla.default_config(call)))(call)
    with xsake.interpret():
        merged = in_parts(call)
    for found in merged:
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_parts_are_as_many_as_there_are_workers_and_keys():
    x = jnp.zeros((1, 1, 8, 64), jnp.bfloat16)
    sizes = {"block_q": 128, "block_kv": 128, "q_len": 1}

    def cut(keys, **changes):
        mask = mosaic_mask(keys, **sizes)
        call = build_call(x, *[jnp.zeros((1, keys, 2, 64), jnp.bfloat16)] * 2, mask, default_blocks=(128, 128))
        return RowParts.of(dataclasses.replace(call, **changes), workers=264, least_rows=64)

    assert cut(32768) == RowParts(group=4, rows=64, parts=64)  # 512 keys each
    assert cut(1 << 20) == RowParts(group=4, rows=64, parts=132)  # two K/V heads
    assert cut(256) == RowParts(group=4, rows=64, parts=1)
    assert cut(32768, bias=jnp.zeros((1, 1, 1, 1), jnp.bfloat16)) is None
    assert cut(32768, query=jnp.zeros((1, 9, 8, 64), jnp.bfloat16)) is None


def mosaic_mask(keys, **sizes):
    blocks = np.ones((1, -(-keys // sizes["block_kv"])), bool)
    return xsake.BlockMask.from_blocks(blocks, **sizes, kv_len=keys, transpose=False)


def test_the_merge_lowers_for_cuda():
    x, k = (jnp.zeros((2, t, h, 128), jnp.bfloat16) for t, h in ((2, 12), (5000, 2)))
    call = build_call(x, k, k, mosaic_mask(5000, block_q=128, block_kv=128, q_len=2), default_blocks=(128, 128))
    few = FewQueries(call, RowParts(6, 64, 10))
    out, lse = jax.ShapeDtypeStruct((2, 640, 2, 128), jnp.bfloat16), jax.ShapeDtypeStruct((2, 2, 640), jnp.float32)
    lower(lambda *parts: merge.merged(few, *parts), out, lse, chip="sm_80")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_hopper_decodes_in_parts():
    target = dataclasses.replace(HOPPER_INTERPRETED, unit=1)
    sizes = dict(batch=1, q_len=3, kv_len=1100, q_heads=4, kv_heads=2, mask=(1, 1), block_q=64, block_kv=64)
    case = make(target, **sizes, density=0.8, sinks=(4,))
    call = build_call(case.query, case.key, case.value, case.mask(), default_blocks=(64, 64))
    assert mosaic._few_queries(call).parts.parts == 2
    check_run(target, case)
