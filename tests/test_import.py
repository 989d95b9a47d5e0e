"""`import xsake` is light, and every module under it imports: tested in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# One worker, since all is asked of one process.
pytestmark = pytest.mark.xdist_group("import")

SOURCE = Path(__file__).resolve().parents[1] / "src" / "xsake"


def python(code: str) -> str:
    """What a fresh interpreter prints, outside the repository and on the CPU."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    if "PYTHONPATH" in environment:
        environment["PYTHONPATH"] = os.pathsep.join(
            str(Path(p).resolve()) for p in environment["PYTHONPATH"].split(os.pathsep) if p
        )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=Path(sys.prefix)
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def _modules() -> list[str]:
    """Every module of the package; subpackages are links to folders beside src."""
    found = []
    for folder, _, files in os.walk(SOURCE, followlinks=True):
        for file in files:
            if file.endswith(".py") and "__pycache__" not in folder:
                parts = (Path(folder) / file).relative_to(SOURCE).with_suffix("").parts
                found.append(".".join(("xsake", *(p for p in parts if p != "__init__"))))
    return sorted(found)


MODULES = [m for m in _modules() if not m.endswith("__main__")]  # importing this one would run the command line
CODE = f"""
import importlib, json, sys
import jax, jax.numpy as jnp
told = {{"jax": sorted(sys.modules)}}

import xsake
xsake.attention, xsake.BlockMask
told["import xsake"] = sorted(sys.modules)

x = jnp.ones((1, 4, 1, 4))
xsake.attention(x, x, x, xsake.patterns.causal(4, 4))
told["reads entry points"] = "xsake._op.plugins" in sys.modules
xsake.implementations()
told["the first call"] = sorted(sys.modules)

told["touched"] = [
    thing.__module__
    for thing in (
        xsake.hads.select,
        xsake.model.ModelConfig,
        xsake.compat.ejkernel.blocksparse_attention,
        xsake.compat.easydel.OperationRegistry,
        xsake.patterns.causal,
    )
]
told["what a configuration imports"] = sorted(sys.modules)
from xsake import attention, BlockMask, patterns, implementations, interpret
assert xsake.attention is attention
assert set(xsake.__all__) <= set(dir(xsake))
names = {{name: getattr(xsake, name) for name in xsake.__all__}}
told["kinds"] = {{name: type(value).__name__ for name, value in names.items()}}
try:
    xsake.nothing
except AttributeError as error:
    told["nothing"] = str(error)

told["missing"] = {{}}
for name in {MODULES!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        told["missing"][name] = error.name or str(error)
told["shadowed"] = [name for name, value in names.items() if getattr(xsake, name) is not value]
for door in (xsake.hads, xsake.model):
    told["shadowed"] += [name for name in door.__all__ if type(getattr(door, name)).__name__ == "module"]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What a fresh process finds: with jax alone, with xsake, after a call, and with every module."""
    return json.loads(python(CODE))


HEAVY = {
    "optuna",
    "flax",
    "optax",
    "orbax",
    "tensorflow",
    "torch",
    "triton",
    "jax_triton",
    "matplotlib",
    "rich",
    "typer",
    "tokenizers",
    "gguf",
    "safetensors",
    "fastapi",
    "pydantic",
    "starlette",
    "uvicorn",
    "prometheus_client",
}


@pytest.mark.parametrize("when", ["import xsake", "the first call"])
def test_import_is_light(told, when):
    """Also after the first call on a CPU."""
    modules = told[when]
    heavy = [m for m in modules if m.split(".")[0] in HEAVY]
    heavy += [m for m in modules if "pallas" in m]  # (JAX itself loads Mosaic's dialects when it first compiles)
    assert not heavy, f"{when} imported {heavy}"
    bare = [
        m
        for m in modules
        if m.split(".")[0] in ("hads", "model", "autotune", "tuning_db", "benchmarks") or m.startswith("kernels_")
    ]
    assert not bare, f"{when} imported {bare} at top level; they are xsake's subpackages"


def test_import_brings_little_beyond_jax(told):
    """No kernel, no tuner, no model, one small library. Modules are counted, since seconds depend on the machine."""
    new = set(told["import xsake"]) - set(told["jax"])
    libraries = {m.split(".")[0] for m in new} - set(sys.stdlib_module_names)
    assert libraries <= {"xsake", "jaxtyping", "numpy", "wadler_lindig", "typing_extensions"}
    rooms = {m.split(".")[1] for m in new if m.startswith("xsake.") and not m.startswith("xsake._")}
    assert rooms == {"backend", "hads", "tuning_db"}
    assert len(new) <= 60, new


def test_entry_points_are_read_when_another_package_s_backend_may_be_meant(told):
    assert not told["reads entry points"]


def test_subpackages_resolve_at_first_touch(told):
    """After `import xsake` alone: no import of `xsake.hads` and the like, and no Flax for what needs none."""
    assert told["touched"] == [
        "xsake.hads.selection.select",
        "xsake.model.network.config",
        "xsake.compat.ejkernel",
        "xsake.compat.easydel",
        "xsake.hads.mask.patterns",
    ]
    assert "flax" not in told["what a configuration imports"]


def test_a_missing_extra_is_named():
    """As the command line names it, with a command that works in a checkout."""
    code = """
import sys
sys.modules["flax"] = None  # as if it were not installed
import xsake.model
xsake.model.ModelConfig
try:
    xsake.model.Transformer
except ModuleNotFoundError as error:
    print(error.name, "|", error)
"""
    said = "flax is not installed; models need it: pip install 'xsake[model]' (in a checkout: pip install '.[model]')"
    assert python(code) == f"flax | {said}\n"


def test_every_module_imports(told):
    """Only libraries that an extra installs may be missing."""
    assert {"xsake", "xsake._op.attention", "xsake.hads.mask.block_mask", "xsake.kernels_xla_ref.oracle"} <= set(
        MODULES
    )
    extras = (
        "optuna",
        "filelock",
        "flax",
        "optax",
        "orbax",
        "triton",
        "jax_triton",
        "tokamax",
        "tokenizers",
        "matplotlib",
        "gguf",
        "jinja2",
        "fastapi",
        "prometheus_client",
        "pydantic_core",
        "starlette",
        "torch",  # and other projects' packages, in xsake._race.peers
        "cutlass",
        "fastvideo_kernel",
        "sgl_jax",
    )
    wrong = {name: missing for name, missing in told["missing"].items() if missing.split(".")[0] not in extras}
    assert not wrong, wrong


def test_numpy_arrays_are_taken():
    """And checking annotations costs users nothing: no checker is imported."""
    code = """
import sys
import jax
import numpy as np
import xsake
q, k = np.ones((1, 32, 2, 8), np.float32), np.ones((1, 32, 1, 8), np.float32)
rest = dict(bias=np.zeros((1, 1, 32, 32)), sinks=np.zeros(2), key_value_seq_lengths=np.array([30]))
calls = (
    lambda: xsake.attention(q, k, k, segment_ids=np.zeros((1, 32), int), **rest, return_lse=True)[0],
    lambda: xsake.selected_attention(q, k, k, np.zeros((1, 32, 1, 1), int), 1, block_size=16),
    lambda: xsake.moba_attention(q, k, k, block_size=16, num_selected=1, cu_seqlens=np.array([0, 16, 32])),
    lambda: xsake.native_sparse_attention(q, k, k, gate_compressed=np.ones((1, 32, 2)), block_size=16, num_selected=1),
)
print({jax.eval_shape(call).shape for call in calls})
print("beartype" in sys.modules)
"""
    assert python(code).splitlines() == ["{(1, 32, 2, 8)}", "False"]


def test_public_names(told):
    kinds = told["kinds"]
    assert kinds["attention"] == kinds["implementations"] == "function"
    assert (kinds["patterns"], kinds["BlockMask"]) == ("module", "type")
    assert "nothing" in told["nothing"]


def test_public_names_are_themselves_after_all_modules_are_imported(told):
    """A module named like a public function would shadow it."""
    assert told["shadowed"] == []
