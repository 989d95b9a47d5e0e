"""Hopper gradients whose CTAs take several items each, in JAX's interpreter, race detection on."""

from __future__ import annotations

import dataclasses

import pytest
from contract.case import check_run, make
from contract.target import TARGETS
from sweep import sweep

from xsake.kernels_pallas_gpu import mosaic_turns

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
