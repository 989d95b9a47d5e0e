"""delta = rowsum(d_out * out) - d_lse, which Hopper's dQ kernel sums for whole blocks of queries."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from targets import TARGETS

import xsake
from xsake._op import attention as attention_op
from xsake._op.arguments import build_call
from xsake.backend.delta import DeltaParts
from xsake.kernels_pallas_gpu.hopper import backend as mosaic
from xsake.kernels_pallas_gpu.hopper import gradients
from xsake.testing.case import attend, check, check_run, make, run

HOPPER = dataclasses.replace(next(t for t in TARGETS if t.name == "mosaic_gpu"), value_dim=64, marks=())
INTERPRETED = dataclasses.replace(HOPPER, interpret=True)
SMALL = dict(q_len=16, block_q=16, block_kv=16, batch=1, q_heads=1, kv_heads=1, mask=(1, 1), density=1.0)
WHOLE = dict(q_len=96, block_q=16, block_kv=16)  # lengths and blocks are multiplied by the target's unit
CASES = {
    "causal": dict(mask_causal=True),
    "rows of two warpgroups": dict(block_q=32, block_kv=32),
    "logits that are not folded": dict(logits_soft_cap=2.0),
    "a group of heads": dict(q_heads=4, kv_heads=1),
    "no mask": dict(is_causal=True, mask=None),
    "sinks": dict(sinks=(4,)),
    "a bias": dict(bias=(0, 0, 0, 0)),
    "float16": dict(dtype="float16"),
    "other head dims": dict(head_dim=192, value_dim=128),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_whole_blocks(name):
    check_run(HOPPER, make(HOPPER, **(WHOLE | CASES[name])))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("change", "by_kernel"),
    [
        (dict(), True),
        pytest.param(dict(q_len=17), False, marks=pytest.mark.slow),  # its last block is not whole
        pytest.param(dict(value_dim=48), False, marks=pytest.mark.slow),  # its head dim is padded
    ],
)
def test_who_sums_it(monkeypatch, change, by_kernel):
    sums, summed = [], DeltaParts.summed
    monkeypatch.setattr(DeltaParts, "summed", lambda *given: sums.append(1) or summed(*given))
    check_run(INTERPRETED, make(INTERPRETED, **(SMALL | change)))
    assert (not sums) == by_kernel


def test_fused_gradients_take_the_sums():
    case = make(INTERPRETED, **SMALL)
    with INTERPRETED.context():
        call = build_call(**case.inputs, mask=case.mask(), default_blocks=(64, 64))
        config = mosaic.default_config(call)
    parts = DeltaParts(jnp.zeros((*call.query.shape[:3], call.value_dim), call.query.dtype), None)
    assert gradients.form_of(call, config.running("dq")).sums_delta(call, parts)
    fused = dataclasses.replace(config, fused=dataclasses.replace(config.fused, use=True))
    assert not gradients.form_of(call, fused).sums_delta(call, parts)


WHERE = [pytest.param(HOPPER, marks=pytest.mark.gpu), pytest.param(INTERPRETED, marks=pytest.mark.slow)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("target", WHERE, ids=["hopper", "interpreted"])
def test_a_row_that_attends_nothing_takes_any_cotangent(target):
    case = make(target, **(SMALL | dict(q_len=48)))
    blocks, d_out, d_lse = case.blocks.copy(), case.d_out.copy(), case.d_lse.copy()
    blocks[0, 0, 1] = False
    rows = np.s_[:, case.block_q : 2 * case.block_q]
    d_out[rows] = d_lse[rows] = 0
    quiet = check_run(target, case.replace(blocks=blocks, d_out=d_out, d_lse=d_lse))
    d_out[rows] = d_lse[rows] = np.nan
    loud = run(target, case.replace(blocks=blocks, d_out=d_out, d_lse=d_lse))
    for name in ("d_query", "d_key", "d_value"):
        np.testing.assert_array_equal(getattr(loud, name), getattr(quiet, name), err_msg=name)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("target", WHERE, ids=["hopper", "interpreted"])
def test_no_cotangent_of_the_lse(target):
    case = make(target, **SMALL)
    case = case.replace(d_lse=np.zeros_like(case.d_lse))

    def loss(inputs):
        out, _ = attend(target, inputs, case.mask(), {})
        return jnp.vdot(out.astype(jnp.float32), case.d_out.astype(np.float32))

    results = run(target, case)
    with target.context():
        grads = jax.jit(jax.grad(loss))(case.inputs)
    check(case, results._replace(**{f"d_{k}": np.asarray(v) for k, v in grads.items()}))


@pytest.mark.parametrize("with_lse", [False, True])
def test_parts_of_delta_are_cut_with_the_call(monkeypatch, with_lse):
    monkeypatch.setattr(mosaic, "unavailable", lambda: None)
    monkeypatch.setattr(attention_op, "platform_of", lambda query: "gpu")
    mask = xsake.BlockMask.full(256, 256, block_q=128, block_kv=128, is_causal=True)

    def grads(q, d_out):
        results, pull = jax.vjp(
            lambda q: xsake.attention(q, q, q, mask, implementation="mosaic_gpu", return_lse=with_lse), q
        )
        return pull((d_out, results[1]) if with_lse else d_out)

    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        cut = NamedSharding(mesh, PartitionSpec("data", None, "model", None))
        x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16, sharding=cut)
        text = jax.jit(grads).trace(x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "block_sparse_dq" in text
