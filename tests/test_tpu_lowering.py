"""The TPU kernels without a TPU: every default configuration, and every configuration of the search space, lowers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from xsake.kernels_pallas_tpu import ahead, config

ROOT = Path(__file__).parents[1]
BY_NAME = {w.name: w for w in ahead.WORKLOADS}
QUICK = ("decode", "decode from pages", "131072 tokens, block 128", "odd blocks")


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        pytest.param(w.name, kernel, marks=() if w.name in QUICK else pytest.mark.slow)
        for w in ahead.WORKLOADS
        for kernel in w.kernels
    ],
)
def test_default_configuration_lowers(name, kernel):
    assert "tpu_custom_call" in ahead.lower(BY_NAME[name], kernel).as_text()


def _changes(workload):
    """(kernel, configuration): each configuration for the kernels in which it differs from the default."""
    call = workload.call()
    default = config.default_config(call)
    for other in config.search_space(call):
        for kernel in ahead.KERNELS:
            if getattr(other, kernel) != getattr(default, kernel):
                yield kernel, other


@pytest.mark.slow  # default configurations are lowered above
@pytest.mark.parametrize("name", ["group", "block 512", "block 1024", "block 128", "float32", "segments"])
def test_search_space_lowers(name):
    workload = BY_NAME[name]
    changes = list(_changes(workload))
    assert changes
    for kernel, other in changes:
        ahead.lower(workload, kernel, other)


@pytest.mark.parametrize("name", BY_NAME)
def test_search_space_holds_the_default_and_fits(name):
    call = BY_NAME[name].call()
    space = config.search_space(call)
    assert space[0] == config.default_config(call)
    assert len(set(space)) == len(space)
    for other in space:
        for kernel in ahead.KERNELS:
            assert config.fits(call, kernel, getattr(other, kernel))


def test_short_blocks_are_gathered():
    """One block of 128 per chunk is bound by latency, 8 times slower: no chunk is narrower than 512 tokens."""
    for name in ("block 128", "block 64", "131072 tokens, block 128"):
        chosen = config.default_config(BY_NAME[name].call())
        for kernel in ahead.KERNELS:
            tiling = getattr(chosen, kernel)
            assert tiling.entry * tiling.narrow >= 512
            assert tiling.entry * tiling.wide >= 2048


def with_libtpu(*arguments):
    python = os.environ.get("XSAKE_TPU_PYTHON")
    if python is None and importlib.util.find_spec("libtpu") is None:
        pytest.skip('libtpu is not installed (pip install "jax[tpu]"), and XSAKE_TPU_PYTHON names no other interpreter')
    paths = os.pathsep.join(["src", *filter(None, [os.environ.get("PYTHONPATH")])])
    command, env = [python or sys.executable, *arguments], {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("topology", ahead.TOPOLOGIES)
def test_compiles_ahead_of_time(topology):
    run = with_libtpu("-m", "xsake.kernels_pallas_tpu.ahead", "--core", topology)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "kernels compiled" in run.stdout


PAGES_SCRIPT = """
import math, os, re, sys
from xsake.kernels_pallas_tpu import ahead
ahead.without_hardware()
device = ahead.one_device(sys.argv[1])
moved = []
for workload in ahead.WORKLOADS:
    if workload.page is not None:
        text = ahead.lower(workload, "forward", sharding=device).compile().as_text()
        cache = workload.batch * workload.kv_len * workload.kv_heads * workload.head_dim
        for shape, operation in re.findall(r" = \\w+\\[([\\d,]+)\\]\\S* ([\\w-]+)\\(", text):
            if math.prod(map(int, shape.split(","))) >= cache:
                moved.append(operation)
print(*sorted(set(moved)), flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pages_are_not_copied():
    run = with_libtpu("-c", PAGES_SCRIPT, "v5e:2x2")
    assert run.stdout.split() == ["bitcast", "parameter"], run.stdout + run.stderr


def test_a_kernel_that_does_not_compile_is_reported_and_the_rest_goes_on(monkeypatch):
    class Lowered:
        def compile(self):
            pass

    def lower(workload, kernel, **_):
        if kernel == "dq":
            raise ValueError("does not fit")
        return Lowered()

    monkeypatch.setattr(ahead, "one_device", lambda topology: None)
    monkeypatch.setattr(ahead, "lower", lower)
    outcomes = [(kernel, problem) for _, kernel, problem in ahead.sweep("v5e:2x2", ahead.WORKLOADS[:1])]
    assert outcomes == [("forward", None), ("dq", "ValueError: does not fit"), ("dkv", None)]
