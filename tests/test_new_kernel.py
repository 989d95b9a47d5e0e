"""Backends in packages of their own: what `xsake new-kernel` writes, and examples/simple_kernel."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from cuda_offline import lower
from jax import export
from sweep import sweep
from typer.testing import CliRunner

import xsake
from xsake._cli import app, new_kernel
from xsake._op import plugins, registry
from xsake._op.arguments import build_call
from xsake._race import paired
from xsake.autotune.measure import contest, isolation
from xsake.autotune.measure.interference import Contention
from xsake.autotune.search import last_race
from xsake.testing import CHECKS, target_of

_number = itertools.count()
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "simple_kernel"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Run the command and register what it wrote."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(sys, "path", list(sys.path))

    def make(kind):
        name = f"written_{next(_number)}_for_{kind}"
        said = CliRunner().invoke(app, ["new-kernel", name, "--for", kind, "--out", str(tmp_path)])
        assert said.exit_code == 0, said.output
        xsake.register_backend(name, tmp_path / name / name / "backend.py")
        return name, tmp_path / name

    return make


def call():
    query = jnp.zeros((1, 512, 4, 128), "bfloat16")
    mask = xsake.patterns.causal(512, 512, block_q=128, block_kv=128)
    return build_call(query, query[:, :, :2], query[:, :, :2], mask, default_blocks=(128, 128))


# Its own tests, below, run the kernel in XLA.
@pytest.mark.parametrize("kind", sweep(["xla", "gpu", "tpu"], slow=["xla", "tpu"]))
def test_a_new_kernel_is_right(made, kind):
    """In a call of several blocks; those of a GPU are interpreted. Its own tests have more."""
    target = target_of(made(kind)[0])
    assert target.interpret == (kind != "xla") or jax.default_backend() == kind
    CHECKS["rules: unaligned window of the call"].run(target)


def test_a_new_kernel_lowers_for_its_platform(made):
    gpu, tpu = (registry.get(made(kind)[0]) for kind in ("gpu", "tpu"))
    for config in gpu.search_space(call()):
        assert "xla.gpu.triton" in lower(lambda call, config=config: gpu.forward(call, config), call(), chip="sm_80")
    leaves, tree = jax.tree.flatten(call())
    forward = jax.jit(lambda *x: tpu.forward(jax.tree.unflatten(tree, x), tpu.default_config(call())))
    assert "tpu_custom_call" in export.export(forward, platforms=("tpu",))(*leaves).mlir_module()


@pytest.mark.parametrize("which", ["scale", pytest.param("", marks=pytest.mark.slow)])
def test_its_own_tests_pass_as_they_are(made, which):
    _, folder = made("xla")
    run_its_tests(folder, which)


@pytest.mark.parametrize("which", ["refused or lengths", pytest.param("", marks=pytest.mark.slow)])
def test_the_tests_of_the_adapter_pass_without_its_gpu(which):
    run_its_tests(EXAMPLE.parent / "jax_mosaic", which)


def run_its_tests(folder, which):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", which]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout


def test_names_and_options_that_cannot_be(tmp_path):
    (tmp_path / "there").mkdir()
    for words, says in (
        (["my-kernel"], "must be a lower-case identifier"),
        (["xla"], "exists already, as an implementation or as a package"),
        (["json"], "exists already, as an implementation or as a package"),
        (["there"], "there exists already"),
        (["mine", "--for", "amd"], "--for 'amd' must be one of ['gpu', 'tpu', 'xla']"),
    ):
        said = CliRunner().invoke(app, ["new-kernel", *words, "--out", str(tmp_path)])
        assert said.exit_code == 1 and says in said.output, said.output
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


# -- the example -------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The example's package, built and installed into an environment of its own."""
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-compile"]
    source = tmp_path / "source"  # so that the build leaves nothing in the checkout
    source.mkdir()
    for path in [EXAMPLE / "pyproject.toml", *(EXAMPLE / "simple_kernel").glob("*.py")]:
        copy = source / path.relative_to(EXAMPLE)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    subprocess.run([*command, "--target", str(site), str(source)], check=True, capture_output=True)
    monkeypatch.setattr(plugins, "installed", plugins.cache(plugins.installed.__wrapped__))
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))


def test_the_example_is_checked_tuned_raced_and_gated_by_the_commands(installed, tmp_path, monkeypatch):
    """As its README says, with little time, and on a machine that others use."""
    assert xsake.implementations()["simple_kernel"] is None
    assert registry.source("simple_kernel") == "simple-kernel 0.1.0"
    monkeypatch.setattr(contest, "contention", lambda: contextlib.nullcontext(Contention()))
    monkeypatch.setattr(last_race, "disturbance", lambda *race: None)
    check = ["check", "simple_kernel", "--quick", "--only", "vmap,positions"]
    tune = ["autotune", "--implementation", "simple_kernel", "--from-call", "1x96x2x16,block=16,causal,density=0.5"]
    tune += ["--no-isolate", "--budget", "30s", "--out", str(tmp_path / "db")]
    monkeypatch.setattr(isolation, "Worker", isolation.Here)  # for the race: checks have processes of their own
    race = ["race", "--shape", "1x96x2x16,block=16,causal", "--against", "simple_kernel", "--rounds", "2"]
    monkeypatch.setattr(paired, "disturbance", lambda *race: None)
    quickly = ["--storage", str(tmp_path / "kept"), "--rounds", "3", "--round-seconds", "0.001"]
    gate = ["gate", "--record", "--shape", "1x96x2x16,block=16,causal", "--implementation", "simple_kernel", *quickly]
    told = "2 of 2 checks hold", "1 workload-density pairs", "simple_kernel", "recorded in"
    for words, says in zip((check, tune, race, gate), told, strict=True):
        said = CliRunner().invoke(app, words, env={"COLUMNS": "150"})
        assert said.exit_code == 0 and says in said.output, said.output
    said = CliRunner().invoke(app, ["gate", *quickly], env={"COLUMNS": "150"})
    assert "simple_kernel forward" in said.output and "allowed" in said.output, (
        said.output
    )  # so short, it may be slower


def test_the_example_differs_from_a_new_package_in_its_kernel_alone():
    files = new_kernel.package("simple_kernel", "xla")
    for path in ("pyproject.toml", "tests/conftest.py", "tests/test_contract.py"):
        assert (EXAMPLE / path).read_text() == files[path]
