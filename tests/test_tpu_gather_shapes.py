"""The other way to gather blocks gives the same results, so that cycles may be compared; and how cycles are counted."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

import xsake
from benchmarks.tpu import gather_shapes as shapes


def test_it_is_attention():
    heads, length, block, dim = 2, 640, 128, 128
    rng = np.random.default_rng(0)
    blocks = np.tril(rng.random((heads, 5, 5)) < 0.7)
    blocks[0, 3] = False
    q, k, v = (jnp.asarray(rng.standard_normal((1, length, heads, dim)), jnp.float32) for _ in range(3))
    sizes = dict(block_q=block, block_kv=block, q_len=length, kv_len=length)
    mask = xsake.BlockMask.from_blocks(blocks[None], is_causal=True, **sizes)
    exact, exact_lse = xsake.attention(q, k, v, mask, return_lse=True, implementation="xla")

    def cut(x):
        return x[0].swapaxes(0, 1).reshape(heads, 5, block, dim)

    out, lse = shapes.by_specs(
        shapes.chunks_of(blocks, 2),
        cut(q),
        jnp.stack([cut(k), cut(v)], 2),
        count=2,
        tested=True,
        interpret=pltpu.InterpretParams(),
    )
    np.testing.assert_allclose(out.reshape(heads, length, dim).swapaxes(0, 1), exact[0], atol=2e-6)
    np.testing.assert_allclose(lse.reshape(heads, length).T, exact_lse[0], atol=3e-6)


BUNDLES = """
     0   :  { %0 = smov }
   0x1 LB: > { %1 = smov }
   0x2   : > { %2 = sbr.rel (%p1) target bundleno = 9 (0x9), region = 3 }
   0x3   : > { %3 = smov }
   0x4   : > { %4 = smov }
   0x5   : > { %5 = smov }
   0x6   : > { %6 = smov }
   0x7   : > { %7 = vst }
   0x8   : > { %8 = vst }
   0x9 PF: > { %9 = vmatmul }
   0xa   : > { %10 = sbr.rel (!%p2) target bundleno = 1 (0x1), region = 1 }
   0xb   : > { %11 = smov }
   0xc   :  { %12 = smov }
"""


def test_what_a_row_does_once_is_not_in_every_step():
    step, seldom = shapes.grid_step(shapes.bundles_of(BUNDLES))
    assert (step, seldom) == (9, 2)
