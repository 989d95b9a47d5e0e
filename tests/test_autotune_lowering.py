"""Programs lowered in child processes equal the parent's; the parent lowers programs that a child cannot."""

from __future__ import annotations

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax._src.config import traceback_in_locations_limit

from xsake._ground.device import Gpu, lowering_for
from xsake._op import registry
from xsake._op.arguments import build_call
from xsake.autotune.measure import device_service
from xsake.autotune.measure.contest import Contest
from xsake.autotune.measure.lowering import Lowering, exported
from xsake.autotune.measure.program import Program
from xsake.autotune.problem import Problem
from xsake.autotune.workloads import Workload
from xsake.backend.contract import Call
from xsake.hads.mask.block_mask import BlockMask

pytestmark = pytest.mark.xdist_group("lowering")  # one process has the children

H200 = Gpu(device_kind="NVIDIA H200", compute_capability="9.0", core_count=132)
H20 = Gpu(device_kind="NVIDIA H20", compute_capability="9.0", core_count=78)


class Counted(Lowering):
    """Counts the programs that children lowered."""

    count = 0

    def lower(self, program, arguments):
        lowered = super().lower(program, arguments)
        self.count += 1
        return lowered


@pytest.fixture(scope="module")
def on_cpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
        lowering = Counted(None, children=1)
        yield lowering
        lowering.close()


def contest(lowering: Lowering | None, implementation: str = "xla") -> Contest:
    workload = Workload(name="tiny", batch=1, q_heads=3, kv_heads=3, length=64, head_dim=16, is_causal=True, block=16)
    problem = Problem(workload=workload, dtype="float32", densities=(0.5,), implementation=implementation)
    return Contest(problem, 0.001, lowering)


# -- programs of a child ---------------------------------------------------------------------------------------------


def decoding() -> tuple:
    return (_call(queries=1, keys=65536, q_heads=8, kv_heads=2),)


def gradients() -> tuple:
    statistics = jnp.zeros((1, 16, 2048))
    call = _call(queries=2048, keys=2048, q_heads=16, kv_heads=16)
    return call, statistics, statistics, call.query


def _call(*, queries: int, keys: int, q_heads: int, kv_heads: int) -> Call:
    mask = BlockMask.full(queries, keys, block_q=64, block_kv=64)
    q, k = (jnp.zeros((1, length, heads, 64), jnp.bfloat16) for length, heads in ((queries, q_heads), (keys, kv_heads)))
    return build_call(q, k, k, mask, default_blocks=(64, 64))


@pytest.mark.parametrize(
    ("name", "direction", "arguments", "gpu"),
    [
        pytest.param("triton", "forward", decoding, H200, marks=pytest.mark.slow),
        ("triton", "forward", decoding, H20),
        ("mosaic_gpu", "dq", gradients, H20),
        pytest.param("mosaic_gpu", "dq", gradients, H200, marks=pytest.mark.slow),
        pytest.param("mosaic_gpu", "forward", decoding, H20, marks=pytest.mark.slow),
    ],
)
def test_a_child_without_a_gpu_lowers_for_the_gpu_of_its_parent(on_cpu, name, direction, arguments, gpu):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments())
    with lowering_for(gpu), traceback_in_locations_limit(0):
        config = registry.get(name).default_config(arguments()[0])
        program = Program(implementation=name, direction=direction, config=config, calls=1)
        here = exported(program, shapes, "cuda").mlir_module()
    data = on_cpu._children[0].call("export", program, shapes, gpu, limit=60.0)
    assert export.deserialize(data).mlir_module() == here
    if name == "triton":
        assert f"grid_x = {min(gpu.core_count, 128)} : i32" in here, "the keys are cut for all multiprocessors"


# -- contests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_programs_of_children_give_the_same_results(on_cpu, direction):
    apart, here, before = contest(on_cpu), contest(None), on_cpu.count
    parts = next(plan.parts for plan in here.plans if plan.key.direction == direction)[:2]
    assert apart.compile(direction, parts) == here.compile(direction, parts) == [None, None]
    assert on_cpu.count == before + 2
    for part in parts:
        results = apart._results(direction, 0.5, part)
        for name, wanted in here._results(direction, 0.5, part).items():
            np.testing.assert_array_equal(results[name], wanted)
    assert apart.verify(direction, 0.5, parts[1]).problem is None
    assert all(seconds > 0 for seconds in apart.race(direction, 0.5, parts).seconds)


def test_the_parent_lowers_what_a_child_cannot(on_cpu, monkeypatch):
    """The children do not know the implementation. A program that is wrong in itself fails with its own error."""
    monkeypatch.setitem(registry._BACKENDS, "planted", ("planted", None))
    planted, before = contest(on_cpu, "planted"), on_cpu.count
    parts = [{"chunk": 4, "how": how} for how in ("well", "raises")]
    assert planted.compile("forward", parts) == [None, "RuntimeError: no such instruction"]
    assert on_cpu.count == before and planted.verify("forward", 0.5, parts[0]).problem is None


def test_a_child_that_dies_is_replaced(on_cpu):
    (child,) = on_cpu._children
    apart, before = contest(on_cpu), (on_cpu.count, child.restarts)
    parts = apart.plans[0].parts[:2]
    os.kill(child._process.pid, signal.SIGKILL)
    assert apart.compile("forward", parts) == [None, None]
    assert (on_cpu.count, child.restarts) == (before[0] + 1, before[1] + 1), "the parent lowered one of the two"


def test_one_program_alone_is_lowered_by_the_parent(on_cpu):
    apart, before = contest(on_cpu), on_cpu.count
    assert apart.compile("forward", apart.plans[0].parts[:1]) == [None]
    assert on_cpu.count == before


@pytest.mark.parametrize(
    ("platform", "gpu", "compilers", "children"),
    [
        ("gpu", H200, 14, 8),
        ("gpu", H200, 3, 3),
        ("gpu", H200, 1, None),
        ("gpu", None, 14, None),
        ("cpu", None, 14, None),
    ],
)
def test_children_are_started_where_they_pay(monkeypatch, platform, gpu, compilers, children):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(device_service, "target_gpu", lambda: gpu)
    monkeypatch.setattr(device_service, "COMPILERS", compilers)
    monkeypatch.setattr(device_service, "Lowering", lambda *given: given)
    assert device_service._lowering() == (None if children is None else (gpu, children))
