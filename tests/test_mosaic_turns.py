"""Hopper gradients whose CTAs take several items each, in JAX's interpreter, race detection on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from contract.case import check, check_run, make, run
from contract.target import TARGETS
from sweep import sweep

from xsake._arguments import build_call
from xsake.kernels_pallas_gpu import mosaic, mosaic_turns

TARGET = dataclasses.replace(next(t for t in TARGETS if t.name == "mosaic_gpu"), interpret=True, value_dim=64, marks=())
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
    monkeypatch.setattr(mosaic_turns, "INTERPRETED_CTAS", 1)
    changes = dict(CASES[name])
    dim = changes.pop("head_dim", TARGET.head_dim)
    target = dataclasses.replace(TARGET, head_dim=dim, value_dim=dim)
    case = make(target, batch=1, q_heads=1, kv_heads=1, mask=(1, 1), **changes)
    assert all((case.blocks[0, 0].any(axis).sum() >= 2) for axis in (0, 1)), "no ring goes on from item to item"
    check_run(target, case)


@pytest.mark.slow  # the others have two stages, where there is room
@pytest.mark.timeout(240)
def test_one_and_two_stages_of_resident_rows_give_the_same_bits(monkeypatch):
    monkeypatch.setattr(mosaic_turns, "INTERPRETED_CTAS", 1)
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
