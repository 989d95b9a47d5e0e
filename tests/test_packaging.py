"""What ships: every folder is a subpackage of xsake in the wheel, and nothing else is installed."""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
METHODS_OF_EVALUATE = (
    "from xsake.hads.study.methods.shipped import GROUPS, METHODS; from xsake._cli.hads import METHODS as help"
)
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def folders_with_code() -> set[str]:
    """Top-level folders that are packages."""
    return {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}


def test_every_folder_is_declared_and_linked() -> None:
    expected = {f"xsake.{name}" for name in folders_with_code()} | {"xsake"}
    assert set(PACKAGES["package-dir"]) == expected
    inits = [path.relative_to(ROOT) for name in folders_with_code() for path in (ROOT / name).rglob("__init__.py")]
    inits += [path.relative_to(ROOT / "src" / "xsake") for path in (ROOT / "src" / "xsake").glob("**/__init__.py")]
    nested = {".".join(("xsake", *path.parent.parts)) for path in inits}
    assert set(PACKAGES["packages"]) == nested | {"xsake"}
    for name in folders_with_code():
        link = ROOT / "src" / "xsake" / name
        assert link.is_symlink() and link.resolve() == ROOT / name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # From a copy, so that the build leaves nothing in the checkout.
    source = out / "source"
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if files.returncode:
        pytest.skip("not a git checkout: the list of the project's files is unknown")
    for name in files.stdout.splitlines():
        if (ROOT / name).exists() and not (ROOT / name).is_symlink():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(source),
    ]
    done = subprocess.run(build, check=True, capture_output=True, text=True)
    assert "Warning" not in done.stdout + done.stderr
    return next(out.glob("*.whl"))


def test_wheel_installs_only_xsake_and_imports(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"xsake"}
    assert {"xsake/py.typed", "xsake/_plan/rates.json"} <= set(names)
    assert {f"xsake/tuning_db/{path.name}" for path in (ROOT / "tuning_db").glob("*.json")} <= set(names)
    pages = [path for path in (ROOT / "dashboard" / "static").rglob("*") if path.is_file()]
    assert {f"xsake/dashboard/{path.relative_to(ROOT / 'dashboard')}" for path in pages} <= set(names) and pages
    templates = (ROOT / "src" / "xsake" / "_cli" / "kernel_template").iterdir()
    assert {f"xsake/_cli/kernel_template/{path.name}" for path in templates} <= set(names)
    assert "xsake/dashboard/API.md" in names and not any("node_modules" in name for name in names)
    for package in PACKAGES["packages"]:
        assert f"{package.replace('.', '/')}/__init__.py" in names
    imports = "; ".join(f"import {package}" for package in PACKAGES["packages"])
    check = f"{imports}; import xsake; xsake.attention; xsake.patterns; {METHODS_OF_EVALUATE}"
    check += "; import json; print(json.dumps([xsake.__file__, GROUPS, list(METHODS), help]))"
    env = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    file, groups, methods, said = json.loads(run.stdout)
    assert Path(file).is_relative_to(tmp_path / "site")

    # Other re-implementations of published methods are the study's (benchmarks/hads), not the wheel's.
    rivals = ["sink_window", "mean_top_k", "x_attention_8", "x_attention_16", "flash_prefill"]
    assert groups["rivals"] == rivals and groups["forced"] == [f"{name}+forced" for name in rivals]
    assert groups["ours"] == ["hads", "hads_no_exact_rows", "hads_group"] and set(groups) == {
        "short",
        "ours",
        "rivals",
        "forced",
        "exact",
        "oracles",
    }
    # Help lists what there is, and nothing else: a name, or NAME+forced and NAME+exact for the rivals.
    listed = set(re.findall(r"[\w+]+", said.removeprefix("Groups: ").replace("Methods: ", "")))
    assert {*groups, *methods} - {*groups["forced"], *groups["exact"]} <= listed
    assert {name for name in listed if "_" in name} <= set(methods)
