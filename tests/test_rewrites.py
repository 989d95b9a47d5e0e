"""Rewrites: the order in which the runner applies and undoes them, and gradients that they do not change."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from xsake import kernels_xla_ref as xla
from xsake._op.arguments import build_call
from xsake._rewrites import rewrite
from xsake._rewrites.head_pieces import HeadPieces
from xsake._rewrites.padded_dims import PaddedDims
from xsake._rewrites.reach import Reach
from xsake.kernels_pallas_gpu.hopper.dkv.copied_heads import CopiedHeads
from xsake.kernels_pallas_tpu.float32 import Float32

MASK = xsake.patterns.causal(20, 40, block_q=8, block_kv=8)


def call(dtype="float32"):
    shapes = ((1, 20, 4, 12), (1, 40, 2, 12), (1, 40, 2, 6))
    q, k, v = (jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(shapes))
    return build_call(q, k, v, MASK, default_blocks=(8, 8))


def step(name, seen):
    """A kind of rewrite that lengthens the keys by one, and notes itself in all that passes through it."""

    def note(*given):
        return tuple((*x, name) for x in given)

    class Step(rewrite.Rewrite):
        results = statistics = gradients = staticmethod(note)

        @property
        def call(self):
            return dataclasses.replace(self.given, key=jnp.pad(self.given.key, ((0, 0), (0, 1), (0, 0), (0, 0))))

        def around(self, run):
            return lambda call, *given: seen.append(f"{name} runs {call.kv_len} keys") or run(call, *given)

    return Step


def test_kinds_apply_in_order_and_are_undone_in_reverse():
    seen = []
    kinds = (step("first", seen), lambda call: None, step("second", seen))
    found = rewrite.forward(kinds, call(), lambda call: ((call.kv_len,), ()))
    assert found == ((42, "second", "first"), ("second", "first"))
    assert seen == ["first runs 41 keys", "second runs 42 keys"]
    found = rewrite.backward(
        kinds, call(), ((), (), ("d_out",)), lambda call, lse, delta, d_out: (lse, delta, d_out, 7)
    )
    both = ("first", "second", "second", "first")  # a statistic on its way in, a gradient on its way out
    assert found == (both, both, ("d_out", *both), 7), "a bias's gradient stays as it is"
    assert seen[2:] == seen[:2]


def test_shapes_come_of_all_kinds_and_nothing_is_computed():
    shapes = rewrite.shapes((step("first", []), lambda call: None, step("second", []), Reach.of), call())
    assert shapes.key.shape == (1, 24, 2, 12) and shapes.mask.kv_len == 24
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((shapes.query, shapes.key)))


def padded(call):
    return PaddedDims.of(call, (8, 16))


KINDS = {
    "float32": [(padded,), (lambda call: CopiedHeads(call, 2), padded, lambda call: HeadPieces(call, 2))],
    "float16": [(Float32.of, padded)],
}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("float16", 2e-3)])
def test_gradients_are_those_without_rewrites(dtype, tolerance):
    def run(call, *given):
        config = xla.default_config(call)
        return xla.backward(call, config, *given, with_bias=False)[:3] if given else xla.forward(call, config)

    @jax.jit
    def everything(given, d_out):
        out, lse = xla.forward(given, xla.default_config(given))
        statistics = lse, (out * d_out).sum(-1, dtype=lse.dtype).swapaxes(1, 2), d_out
        return [
            (*rewrite.forward(kinds, given, run), *rewrite.backward(kinds, given, statistics, run))
            for kinds in ((), *KINDS[dtype])
        ]

    expected, *others = everything(call(dtype), jax.random.normal(jax.random.key(3), (1, 20, 4, 6), dtype))
    for found in others:
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
