"""`import xsake` is light, and everything under it imports: asked of fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_import_is_light():
    """Also after the first call on a CPU."""
    code = """
import json, sys
import xsake
after_import = sorted(sys.modules)
import jax.numpy as jnp
x = jnp.ones((1, 4, 1, 4))
xsake.attention(x, x, x, xsake.patterns.causal(4, 4))
xsake.implementations()
print(json.dumps([after_import, sorted(sys.modules)]))
"""
    for when, modules in zip(("import xsake", "the first call"), json.loads(python(code)), strict=True):
        heavy = [
            m
            for m in modules
            if m.split(".")[0]
            in (
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
            )
        ]
        heavy += [m for m in modules if "pallas" in m]  # (JAX itself loads Mosaic's dialects when it first compiles)
        assert not heavy, f"{when} imported {heavy}"
        bare = [
            m
            for m in modules
            if m.split(".")[0] in ("hads", "model", "autotune", "tuning_db", "benchmarks") or m.startswith("kernels_")
        ]
        assert not bare, f"{when} imported {bare} at top level; they are xsake's subpackages"


def test_import_brings_little_beyond_jax():
    """Counted in modules, not in seconds, which are the machine's: no kernel, no tuner, no model, one small library."""
    code = """
import json, sys
import jax, jax.numpy
before = set(sys.modules)
import xsake
xsake.attention, xsake.BlockMask
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    new = json.loads(python(code))
    libraries = {m.split(".")[0] for m in new} - set(sys.stdlib_module_names)
    assert libraries <= {"xsake", "jaxtyping", "numpy", "wadler_lindig", "typing_extensions"}
    rooms = {m.split(".")[1] for m in new if m.startswith("xsake.") and not m.startswith("xsake._")}
    assert rooms == {"hads", "tuning_db"}
    assert len(new) <= 60, new


def _modules() -> list[str]:
    """Every module of the package; subpackages are links to folders beside src."""
    found = []
    for folder, _, files in os.walk(SOURCE, followlinks=True):
        for file in files:
            if file.endswith(".py") and "__pycache__" not in folder:
                parts = (Path(folder) / file).relative_to(SOURCE).with_suffix("").parts
                found.append(".".join(("xsake", *(p for p in parts if p != "__init__"))))
    return sorted(found)


def test_every_module_imports():
    """Only what an extra brings may be missing. (Importing `xsake.__main__` would run the command line.)"""
    modules = [m for m in _modules() if not m.endswith("__main__")]
    assert {"xsake", "xsake._op", "xsake.hads.mask.block_mask", "xsake.kernels_xla_ref.oracle"} <= set(modules)
    code = f"""
import importlib, json
failed = {{}}
for name in {modules!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        failed[name] = error.name or str(error)
print(json.dumps(failed))
"""
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
    )
    failed = json.loads(python(code))
    wrong = {name: missing for name, missing in failed.items() if missing.split(".")[0] not in extras}
    assert not wrong, wrong


def test_public_names():
    code = """
import xsake
print(sorted(xsake.__all__))
assert set(xsake.__all__) <= set(dir(xsake))
assert callable(xsake.attention) and callable(xsake.implementations)
from xsake import attention, BlockMask, patterns, implementations, interpret
assert xsake.attention is attention
try:
    xsake.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise SystemExit("xsake.nothing exists")
"""
    assert "attention" in python(code)


def test_public_names_are_themselves_after_all_modules_are_imported():
    """A module named like a public function would shadow it."""
    code = """
import xsake
names = {name: getattr(xsake, name) for name in xsake.__all__}
import xsake._op, xsake._registry, xsake.hads.mask.patterns, xsake.kernels_xla_ref
for name, value in names.items():
    assert getattr(xsake, name) is value, name
    print(name, type(value).__name__)
"""
    kinds = dict(line.split() for line in python(code).splitlines())
    assert kinds["attention"] == kinds["implementations"] == "function"
    assert (kinds["patterns"], kinds["BlockMask"]) == ("module", "type")
