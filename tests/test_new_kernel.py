"""Backends in packages of their own: what `xsake new-kernel` writes, and examples/simple_kernel."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import venv
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
from xsake._op import registry
from xsake._op.arguments import build_call
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
        (["fa4"], "exists already, as an implementation or as a package"),
        (["there"], "there exists already"),
        (["mine", "--for", "amd"], "--for 'amd' must be one of ['gpu', 'tpu', 'xla']"),
    ):
        said = CliRunner().invoke(app, ["new-kernel", *words, "--out", str(tmp_path)])
        assert said.exit_code == 1 and says in said.output, said.output
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


# -- the example -------------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path):
    """The interpreter of an environment on top of this one, into which pip installed the example."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    (below,) = folder.glob("lib/python*/site-packages")
    roots = {str(Path(module.__file__).parents[1]) for module in (jax, pytest, xsake)}
    (below / "below.pth").write_text("".join(f"import site; site.addsitedir({root!r})\n" for root in sorted(roots)))
    source = tmp_path / "source"  # so that the build leaves nothing in the checkout
    for path in [EXAMPLE / "pyproject.toml", *(EXAMPLE / "simple_kernel").glob("*.py")]:
        copy = source / path.relative_to(EXAMPLE)
        copy.parent.mkdir(exist_ok=True, parents=True)
        copy.write_bytes(path.read_bytes())
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile"]
    options = ["--no-deps", "--no-build-isolation"]
    subprocess.run([*command, *options, str(source)], check=True, capture_output=True)
    return python


def test_the_example_is_checked_tuned_raced_and_gated_by_the_commands(environment, tmp_path):
    """As its README says, with little time."""
    script = Path(__file__).with_name("workbench.py")
    where = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(Path(xsake.__file__).parents[1])}}
    run = subprocess.run([environment, script, tmp_path, EXAMPLE], capture_output=True, text=True, **where)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_example_differs_from_a_new_package_in_its_kernel_alone():
    files = new_kernel.package("simple_kernel", "xla")
    for path in ("pyproject.toml", "gate.py", "tests/conftest.py", "tests/test_contract.py"):
        assert (EXAMPLE / path).read_text() == files[path]
