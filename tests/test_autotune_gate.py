"""The regression gate lets noise through and stops what got slower."""

from __future__ import annotations

import time

import jax
import pytest

from benchmarks import gate
from xsake.autotune.workloads import Workload

RESULT = {"name": "x", "over_dense": 0.30, "over_heuristic": 1.0}


def test_margins():
    gate.check(RESULT, {"x": {"over_dense": 0.25}})
    with pytest.raises(gate.Regression, match=r"x: 0.300 of dense attention's time; 0.230 were recorded, 1.25x"):
        gate.check(RESULT, {"x": {"over_dense": 0.23}})
    with pytest.raises(gate.Regression, match=r"takes 1.20 of the heuristic's time"):
        gate.check(RESULT | {"over_heuristic": 1.2}, {"x": {"over_dense": 0.25}})
    with pytest.raises(KeyError, match="'x' has no recorded ratio"):
        gate.check(RESULT, {})


def test_a_slowed_kernel_is_measured_as_such():
    workload = Workload(name="w", batch=1, q_heads=2, kv_heads=2, length=128, head_dim=16, is_causal=True, block=64)
    case = gate.Case(workload, 0.5, "forward", "float32")

    def slowed(q, k, v, mask):
        def wait(x):
            time.sleep(0.2)  # beside which a busy machine is quiet
            return x

        out = gate.sparse(q, k, v, mask)
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(out.shape, out.dtype), out)

    plain, slow = (gate.measure(case, attend, rounds=3, round_seconds=0.001) for attend in (gate.sparse, slowed))
    assert plain["over_heuristic"] > 0 and plain["name"] == "w 0.5 forward"
    with pytest.raises(gate.Regression):
        gate.check(slow, {"w 0.5 forward": plain})


def test_gates_exist_for_the_shared_workloads():
    assert {case.workload.name for case in gate.cases()} == {"cpu4k"}
    assert {case.direction for case in gate.cases()} == set(gate.DIRECTIONS)
