"""`DeviceService` on real programs: plans, races, and the gate that only right results pass."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import planted
import pytest
from tuning_fakes import tune

import xsake
from xsake._measure import environment, nvidia_smi, verify
from xsake._measure.closeness import Yardstick
from xsake._op import registry, tuned
from xsake.autotune.measure.device_service import DeviceService
from xsake.autotune.problem import Problem, from_call, named
from xsake.autotune.search import last_race
from xsake.autotune.workloads import WORKLOADS, Workload
from xsake.kernels_xla_ref import oracle


def problem(implementation: str = "xla", *, dtype: str = "float32", densities=(1.0, 0.5), **changes) -> Problem:
    sizes = dict(name="tiny", batch=2, q_heads=4, kv_heads=2, length=80, head_dim=16, is_causal=True, block=16)
    return Problem(
        workload=Workload(**sizes | changes), dtype=dtype, densities=densities, implementation=implementation
    )


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(registry._BACKENDS, "planted", ("planted", None))


def test_plans():
    service = DeviceService()
    plans = service.open(problem(densities=(1.0, 0.5, 0.43, None)))
    assert [(p.key.direction, p.densities) for p in plans] == [
        (direction, d) for direction in ("forward", "backward") for d in ((1.0,), (0.5, 0.43), (None,))
    ], "a study for each direction and bucket of density"
    for plan in plans:
        assert plan.default in plan.parts and len(plan.parts) > 2
        assert plan.kernel == tuned.kernel_hash("xla")
    assert [p.key.density for p in plans[:3]] == [1.0, 0.7071, None], "the diagonal makes half more than half here"
    assert plans[0].key == tuned.key_of("xla", _call(problem(), 1.0), "forward"), "what a user's call looks up"


def _call(p: Problem, density: float):
    from xsake._op.arguments import build_call

    return build_call(*p.workload.inputs(p.dtype), p.workload.mask(density), default_blocks=(16, 16))


def test_one_program_serves_all_densities():
    service = DeviceService(round_seconds=0.001)
    plans = service.open(problem(densities=(1.0, 0.5, 0.2)))
    default = plans[0].default
    assert service.compile("forward", [default]) == [None]
    before = dict(service.contest._programs)
    for plan in plans[:3]:
        assert all(s > 0 for s in service.race("forward", plan.densities[0], [default]).seconds)
    assert service.contest._programs == before


PROBLEMS = [dict(dtype="bfloat16"), dict(kv_length=50, value_dim=24, block_kv=32, is_causal=False)]


@pytest.mark.slow  # the winners of test_tuning_from_nothing_to_the_next_call pass, in both directions
@pytest.mark.parametrize("changes", PROBLEMS, ids=str)
def test_right_results_pass_in_every_direction(changes):
    service = DeviceService(round_seconds=0.001)
    for plan in service.open(problem(densities=(0.5,), **changes)):
        other = next(part for part in plan.parts if part != plan.default)
        for part in (plan.default, other):
            verdict = service.verify(plan.key.direction, plan.densities[0], part)
            assert verdict.problem is None
            assert all(0 <= e["rms"] <= e["max"] <= e["allowed_max"] for e in verdict.errors.values())
        names = ("out", "lse") if plan.key.direction == "forward" else ("d_query", "d_key", "d_value")
        assert tuple(verdict.errors) == names


def test_wrong_results_do_not_pass(registered):
    """Also where the wrong head is not among the heads that the oracle computes."""
    service = DeviceService(round_seconds=0.001)
    plan = service.open(problem("planted", densities=(1.0,), q_heads=3, kv_heads=3, batch=1))[0]
    for how in ("wrong", "wrong in one head"):
        verdict = service.verify("forward", 1.0, {"chunk": 4, "how": how})
        assert verdict.problem is not None and "out: " in verdict.problem
    assert service.verify("forward", 1.0, plan.default).problem is None


@pytest.mark.slow
def test_yardsticks_are_the_oracle_s_whatever_the_chunks(monkeypatch):
    p = problem()
    q, k, v = p.workload.inputs("float32")
    mask, d_out = p.workload.mask(0.5), jax.random.normal(jax.random.key(1), q.shape)
    (out, lse), pull = jax.vjp(lambda *x: oracle.attention(*x, mask, return_lse=True), q, k, v)
    d_query, d_key, d_value = pull((d_out, jnp.zeros_like(lse)))
    whole = dict(out=out, lse=lse, d_query=d_query, d_key=d_key, d_value=d_value)
    for elements in (1, 2**22):
        monkeypatch.setattr(verify, "_FEW_ELEMENTS", elements)
        found = verify.yardsticks(q, k, v, d_out, mask)
        for name, x in whole.items():
            heads = slice(1, 2) if name in ("d_key", "d_value") else slice(2, 4)
            np.testing.assert_allclose(found[name].exact, np.asarray(x)[1:2, :, heads], atol=2e-6, err_msg=name)
            assert found[name].exact.dtype == np.float64


def test_nan_is_wrong():
    yardstick = Yardstick(np.zeros(3), 1.0, 1.0)
    assert yardstick.problem("out", np.zeros(3)) is None
    assert "(1,): nan instead of 0" in yardstick.problem("out", np.array([0, np.nan, 0]))


@pytest.mark.slow  # the verdict is tested above, and the worker's failures in test_autotune_tuner.py
def test_planted_configurations_never_win(tmp_path, monkeypatch):
    """In a real worker: a wrong configuration is rejected, a hanging one is killed, the others are measured."""
    monkeypatch.setattr(last_race, "disturbance", lambda times, contended: None)  # others may run here
    mine = problem("planted", densities=(1.0,), batch=1, q_heads=3, kv_heads=3, length=32)
    results = tune(tmp_path, mine, service=planted.service, isolate=True, limit=4.0, rounds=2).results
    states = {t.part["how"]: t.state for t in results[0].tried}
    assert states["well"] == "complete" and results[0].config == {"chunk": 4, "how": "well"}
    assert states["wrong"] == "wrong", "the fastest of all"
    assert states["hangs"] == "failed" and states["raises"] == "failed" and states["slow"] == "slower"
    assert results[1].config is not None, "the backward was tuned after all that"


def test_a_named_workload_must_exist():
    with pytest.raises(ValueError, match=r"workloads \['gpt5'\] are unknown; there are \['cpu16k', 'cpu4k'"):
        named(["gpt5"], [128], [1.0], "float32", None)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1x4096x8", "the query's shape '1x4096x8' is not right"),
        ("1x4096x8x64,color=red", r"unknown \['color'\]"),
        ("1x4096x8x64,kv=4096x3", "q_heads=8 must be divisible by kv_heads=3"),
        ("1x4096x8x64,density=2", "density=2.0 must be above 0 and at most 1"),
        ("1x4096x8x64,block=0", "block '0' is not right"),
        ("1x4096x8x64,dv=big", "dv 'big' is not right"),
    ],
)
def test_a_call_on_the_command_line_must_make_sense(text, problem):
    with pytest.raises(ValueError, match=problem):
        from_call(text, "float32", [1.0], None)


def test_a_call_on_the_command_line():
    p = from_call("2x100x8x64, kv=200x2, dv=32, block=16x32, density=0.5, dtype=float16", "float32", [1.0], "xla")
    q, k, v = p.workload.inputs(p.dtype)
    assert (q.shape, k.shape, v.shape) == ((2, 100, 8, 64), (2, 200, 2, 64), (2, 200, 2, 32))
    mask = p.workload.mask(0.5)
    assert (mask.block_q, mask.block_kv, mask.q_len, mask.kv_len) == (16, 32, 100, 200)
    assert p.densities == (0.5,) and p.dtype == "float16" and not p.workload.is_causal


def test_a_workload_says_its_shape():
    sizes = dict(kv_length=77, value_dim=32, block=64, block_kv=32)
    for one in (*WORKLOADS.values(), *(dataclasses.replace(w, **sizes) for w in WORKLOADS.values())):
        assert dataclasses.replace(from_call(one.shape, "float32", [1.0], None).workload, name=one.name) == one


def test_masks_of_workloads_carry_their_density():
    mask = problem(length=1024).workload.mask(0.25)
    assert mask.density_hint == xsake.hads.density_bucket(float(mask.density()))
    assert dataclasses.replace(mask, density_hint=None).density_hint is None


def test_conditions_are_what_the_machine_tells(monkeypatch, tmp_path):
    assert environment.conditions(None)["load"] >= 0
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ "$1" = --id=0000:17:00.0 ] && echo "1980, [N/A], 41, 312.5"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = environment.conditions("0000:17:00.0")
    assert found | {"load": 0} == {"load": 0, "sm_mhz": 1980.0, "celsius": 41.0, "watts": 312.5}
    monkeypatch.setenv("PATH", "")
    assert list(environment.conditions("0000:17:00.0")) == ["load"], "without the tool nothing is made up"


@pytest.mark.parametrize(("jax_counts", "bus"), [(0, "0000:C1:00.0"), (1, "0000:17:00.0")])
def test_the_gpu_of_nvidia_smi_is_that_of_jax(monkeypatch, jax_counts, bus):
    """CUDA sees two GPUs in an order of its own; it says on which bus each is."""

    class Cuda:
        def cuInit(self, flags):
            return 0

        def cuDeviceGet(self, handle, ordinal):
            handle._obj.value = 10 + ordinal
            return 0

        def cuDeviceGetPCIBusId(self, name, length, handle):
            name.value = {10: b"0000:C1:00.0", 11: b"0000:17:00.0"}[handle.value]
            return 0

    device = types.SimpleNamespace(platform="gpu", local_hardware_id=jax_counts)
    monkeypatch.setattr(nvidia_smi.jax, "local_devices", lambda: [device])
    monkeypatch.setattr(nvidia_smi.ctypes, "CDLL", lambda name: Cuda())
    assert nvidia_smi.gpu_of_this_process() == bus
