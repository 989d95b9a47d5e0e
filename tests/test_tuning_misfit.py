"""A configuration that was tuned for one call and does not fit another: every backend says so before it runs."""

from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp
import pytest

import xsake
from tests.test_mosaic_lowering import ARGUMENTS, SHAPES, make_call
from xsake._op import registry
from xsake._op.arguments import build_call
from xsake.kernels_pallas_gpu.hopper import gradients
from xsake.kernels_pallas_gpu.limits import HOPPER_SHARED_MEMORY

LARGE = f"it needs [0-9]+ bytes of shared memory; {HOPPER_SHARED_MEMORY} are"
CASES = [
    ("mosaic_gpu", "forward", dict(stages=9), f"forward: {LARGE}"),
    ("mosaic_gpu", "dq", dict(tile=128), "dq: tile=128 does not divide the mask's block of 64"),
    ("mosaic_gpu", "dkv", dict(stages=9, inner_stages=9), f"dkv: {LARGE}"),
    ("mosaic_gpu", "dkv", dict(split=True, compute_wgs=1), "dkv: head dims 128 and 128 need compute_wgs=2 and tile=64"),
    ("mosaic_gpu", "dkv", dict(split=True, resident_stages=2), "dkv: this call needs resident_stages=1"),
    ("triton", "dq", dict(q=128), "dq: tile 128 x [0-9]+ does not divide block 64 x 64"),
    ("triton", "forward", dict(num_stages=8), "forward: it needs more shared memory"),
    ("mosaic_tpu", "forward", dict(own=48), "forward: own=48 must divide"),
    ("mosaic_tpu", "dq", dict(fold=2), "dq: fold=2 must divide 1, the heads"),
    ("mosaic_tpu", "dkv", dict(wide=2048, compute=131072), "dkv: it needs [0-9]+ bytes of VMEM"),
    ("xla", "backward", dict(kv=48), "backward: tile 64 x 48 does not divide block 64 x 64"),
]


@pytest.mark.parametrize(("name", "direction", "change", "told"), CASES, ids=[f"{c[0]}-{c[1]}-{c[2]}" for c in CASES])
def test_misfit(name, direction, change, told):
    x = jnp.ones((1, 256, 4, 128), jnp.bfloat16)
    mask = xsake.BlockMask.full(256, 256, block_q=64, block_kv=64, is_causal=True)
    call, backend = build_call(x, x, x, mask, default_blocks=(64, 64)), registry.get(name)
    config = backend.default_config(call)
    assert backend.misfit(call, config) is None
    odd = dataclasses.replace(config, **{direction: dataclasses.replace(getattr(config, direction), **change)})
    problem = backend.misfit(call, odd)
    assert problem is not None

    assert re.match(told, problem), problem


def test_a_misfit_is_refused_before_a_kernel_runs():
    x = jnp.ones((1, 256, 4, 128), jnp.bfloat16)
    mask = xsake.BlockMask.full(256, 256, block_q=64, block_kv=64, is_causal=True)
    call, backend = build_call(x, x, x, mask, default_blocks=(64, 64)), registry.get("mosaic_gpu")
    config = backend.default_config(call)
    rows = jnp.zeros((1, 4, 256), jnp.float32)
    fused = dataclasses.replace(config, fused=dataclasses.replace(config.fused, use=True))
    with pytest.raises(ValueError, match="fused: the mask's block of 64 keys must be a multiple of 128"):
        backend.backward(call, fused, rows, rows, x, with_bias=False)
    deep = dataclasses.replace(config, forward=dataclasses.replace(config.forward, stages=9))
    with pytest.raises(ValueError, match=f"forward: {LARGE}"):
        backend.forward(call, deep)


@pytest.mark.parametrize("name", [*SHAPES, *ARGUMENTS])
def test_the_form_that_a_default_wants_knows_the_call(name):
    call = make_call(**(SHAPES | ARGUMENTS)[name])
    backend = registry.get("mosaic_gpu")
    config, shapes = backend.default_config(call), backend._gradient_shapes(call)
    assert gradients.form_of(shapes, config).knows(shapes) is None
    assert all(backend.misfit(call, config) is None for config in backend.search_space(call))
