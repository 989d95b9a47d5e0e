"""The TPU kernels, interpreted: values and gradients against float64, with races and reads out of bounds detected.

Interpretation is slow to compile, so these few cases touch every code path together; the whole contract runs on the
interpreted kernels in the slow suite.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from sweep import sweep

import xsake
from xsake.kernels_pallas_tpu import Config, Tiling
from xsake.testing.case import Case, check, make, run
from xsake.testing.target import Target


def _configs(case: Case) -> tuple[Config, Config]:
    """For blocks of 128: one chunk size; chunks of two entries and of one, in passes shorter than an entry."""
    one = Tiling(own=128, entry=128, wide=1, narrow=1, compute=128)
    two = Tiling(own=64, entry=128, wide=2, narrow=1, compute=64)
    return Config(forward=one, dq=one, dkv=one), Config(forward=two, dq=dataclasses.replace(one, wide=2), dkv=one)


TPU = Target("mosaic_tpu", interpret=True)

SMOKE = {
    "causal, a mask per head, empty rows, sinks, group": dict(
        q_len=75, batch=1, mask_causal=True, sinks=(4,), density=0.4
    ),
    "all of these, bias, soft cap, odd blocks": dict(
        q_len=75,
        kv_len=107,
        batch=1,
        q_heads=2,
        kv_heads=1,
        mask=(1, 2),
        mask_causal=True,
        density=0.4,
        sinks=(2,),
        bias=(1, 0, 0, 0),
        logits_soft_cap=2.0,
        block_q=12,
        block_kv=20,
    ),
    "one query": dict(q_len=1, kv_len=107, exact_lengths=True, batch=1, density=0.8),
}


pytestmark = pytest.mark.usefixtures("strict_tpu_interpreter")


@pytest.mark.parametrize("name", sweep(SMOKE, slow=["causal, a mask per head, empty rows, sinks, group", "one query"]))
def test_smoke(name):
    case = make(TPU, **SMOKE[name])
    check(case, run(TPU, case))


@pytest.mark.slow
def test_every_chunk_size_and_the_way_from_step_to_step():
    """Wide, narrow and mixed chunks; rows of 0 to 5 blocks, so that any kind of step follows any other."""
    length, block = 5 * 128, 128
    blocks = np.zeros((1, 2, 5, 5), bool)
    for row, count in enumerate((3, 0, 0, 5, 1)):
        blocks[0, 0, row, 5 - count :] = True
    blocks[0, 1] = np.arange(25).reshape(5, 5) % 3 > 0
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, length, 2, 16)), jnp.float32) for _ in range(3))
    mask = xsake.BlockMask.from_blocks(blocks, block_q=block, block_kv=block, q_len=length, kv_len=length)
    exact, exact_lse = xsake.attention(q, k, v, mask, return_lse=True, implementation="xla")
    rest = Tiling(own=128, entry=128, wide=1, narrow=1, compute=128)
    for tiling in (
        Tiling(own=128, entry=128, wide=2, narrow=1, compute=128),
        Tiling(own=64, entry=128, wide=4, narrow=2, compute=256, mixed=True),
    ):
        with xsake.interpret():
            out, lse = xsake.attention(
                q,
                k,
                v,
                mask,
                return_lse=True,
                implementation="mosaic_tpu",
                config=Config(forward=tiling, dq=rest, dkv=rest),
            )
        np.testing.assert_allclose(out, exact, atol=2e-6)
        np.testing.assert_allclose(lse, exact_lse, atol=2e-6)


@pytest.mark.slow  # the odd blocks above have such rows, too
def test_padding_inside_full_blocks():
    """Blocks of 100 keys take 128 rows: nobody attends to the other 28, even if the mask's rule excludes nothing."""
    case = make(TPU, q_len=64, kv_len=200, batch=1, block_q=64, block_kv=100, exact_lengths=True, density=1.0)
    check(case, run(TPU, case, config=_configs(case)[1]))


def test_a_tiling_that_does_not_suit_the_mask():
    case = make(TPU, q_len=256, kv_len=256, batch=1, block_q=128, block_kv=128, exact_lengths=True)
    odd = Tiling(own=48, entry=128, wide=1, narrow=1, compute=128)
    config = dataclasses.replace(_configs(case)[0], forward=odd)
    with pytest.raises(ValueError, match="own=48 must divide 128"):
        run(TPU, case, config=config)
    with pytest.raises(ValueError, match="wide=1 must be at least narrow=2"):
        Tiling(own=128, entry=128, wide=1, narrow=2, compute=128)
    with pytest.raises(ValueError, match="fold=2 must divide"):
        run(TPU, case, config=dataclasses.replace(config, forward=dataclasses.replace(odd, own=128, fold=2)))


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_given_configurations(which):
    case = make(TPU, q_len=300, kv_len=200, batch=1, block_q=128, block_kv=128, exact_lengths=True, mask_causal=True)
    check(case, run(TPU, case, config=_configs(case)[which]))
