"""Hopper gradients whose CTAs take several items each, in JAX's interpreter, race detection on."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sweep import sweep
from targets import HOPPER_INTERPRETED as TARGET

import xsake
from xsake._op.arguments import build_call
from xsake.kernels_pallas_gpu.hopper import backend as mosaic
from xsake.kernels_pallas_gpu.hopper.dkv import plan as dkv_plan
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing
from xsake.kernels_pallas_gpu.hopper.work import turns
from xsake.testing.case import check, check_run, make, run

CASES = {
    "one list for both warpgroups": dict(q_len=96, block_q=32, block_kv=32, density=0.5, seed=1),
    "a list per warpgroup, odd lengths": dict(
        q_len=310, kv_len=330, block_q=16, block_kv=16, exact_lengths=True, density=0.5
    ),
    "a warpgroup for dK and one for dV": dict(q_len=96, block_q=32, block_kv=16, density=0.5, head_dim=160),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", sweep(CASES, slow=[name for name in CASES if "odd" in name or "dK" in name]))
def test_one_cta_takes_all_items(name, monkeypatch):
    monkeypatch.setattr(turns, "INTERPRETED_CTAS", 1)
    changes = dict(CASES[name])
    dim = changes.pop("head_dim", TARGET.head_dim)
    target = dataclasses.replace(TARGET, head_dim=dim, value_dim=dim)
    case = make(target, batch=1, q_heads=1, kv_heads=1, mask=(1, 1), **changes)
    assert all((case.blocks[0, 0].any(axis).sum() >= 2) for axis in (0, 1)), "no ring goes on from item to item"
    check_run(target, case)


@pytest.mark.slow  # the others have two stages, where there is room
@pytest.mark.timeout(240)
def test_one_and_two_stages_of_resident_rows_give_the_same_bits(monkeypatch):
    monkeypatch.setattr(turns, "INTERPRETED_CTAS", 1)
    case = make(TARGET, batch=1, q_heads=1, kv_heads=1, mask=(1, 1), **CASES["one list for both warpgroups"])
    with TARGET.context():
        call = build_call(**case.inputs, mask=case.mask(), default_blocks=(128, 128))
        default = mosaic.default_config(call).running("dq")
    found = []
    for stages in (1, 2):
        parts = {n: dataclasses.replace(getattr(default, n), resident_stages=stages) for n in ("dq", "dkv")}
        found.append(run(TARGET, case, config=dataclasses.replace(default, **parts)))
    check(case, found[0])
    for name in ("d_query", "d_key", "d_value"):
        np.testing.assert_array_equal(*(getattr(x, name) for x in found), err_msg=name)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "sizes", sweep([(4, 4, 64), (4, 2, 64), (4, 1, 70), (6, 2, 64)], slow=[(4, 2, 64), (4, 1, 70), (6, 2, 64)])
)
def test_the_longest_columns_are_cut_by_heads(sizes, monkeypatch):
    heads, lists, length = sizes
    monkeypatch.setattr(dkv_plan, "longest_share", lambda call: 2.0)
    monkeypatch.setattr(dkv_plan, "early_ranks", lambda pairs: 1)
    shape = dict(q_len=length, block_q=32, block_kv=32, density=0.6, mask_causal=True)
    case = make(TARGET, batch=1, q_heads=heads, kv_heads=2, mask=(1, lists), **shape)
    with TARGET.context():
        call = build_call(**case.inputs, mask=case.mask(), default_blocks=(128, 128))
        packing = Packing.of_call(call)
        assert dkv_plan.DkvPlan.of(call, packing, mosaic.default_config(call).dkv).work.parts == heads // 2
    check_run(TARGET, case)


def test_columns_are_cut_where_an_sm_would_wait_for_one():
    """A sink and a window in 32 heads: the fewer keys a query has, the more of an SM's work is a sink's column."""

    def parts(kind: str, length: int, window: int, kv_heads: int, head_dim: int = 128) -> int:
        mask = xsake.patterns.sink_window(length, length, sink=128, window=window)
        q, k = (jax.ShapeDtypeStruct((1, length, n, head_dim), jnp.bfloat16) for n in (32, kv_heads))
        found = []

        def look(q, k):
            call = build_call(query=q, key=k, value=k, mask=mask, is_causal=True, default_blocks=(128, 128))
            config = mosaic.default_config(call)
            plan = dkv_plan.DkvPlan.of(call, Packing.of_call(call), config.dkv)
            found.append({"dkv": plan.parts, "fused": config.fused.parts}[kind])

        jax.eval_shape(look, q, k)
        return found[0]

    assert parts("dkv", 8192, 1024, 8) == 4
    assert parts("dkv", 8192, 1024, 2) == 8
    assert parts("dkv", 8192, 1024, 32) == 1, "there is one head"
    assert parts("dkv", 8192, 1024, 8, head_dim=256) == 1, "two warpgroups share keys"
    assert parts("dkv", 8192, 8192, 8) == 1, "an SM has more work than that"
    assert [parts("fused", 32768, window, 8) for window in (1024, 8192, 32768)] == [4, 2, 2]


def test_an_interpreted_plan_loads_ahead_like_a_compiled_one():
    """Its float32 accumulators lie in shared memory, of which a GPU would need none for them."""
    q = jnp.zeros((1, 512, 4, 128), jnp.bfloat16)
    call = build_call(q, q, q, xsake.BlockMask.full(512, 512, block_q=128, block_kv=128), default_blocks=(128, 128))
    config = dataclasses.replace(mosaic.default_config(call).dkv, resident_stages=None)
    plans = [dkv_plan.DkvPlan.of(call, Packing.of_call(call), config, interpret) for interpret in (False, True)]
    assert plans[0].ahead == plans[1].ahead and plans[0].smem_bytes() == plans[1].smem_bytes()
    assert any(x.shared() != plans[0].shared() for x in plans)
