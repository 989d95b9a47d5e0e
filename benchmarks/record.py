"""Recorded runs: what was measured, where, with what. Tables and plots are made from these files and nothing else."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from xsake._ground import atomic

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def environment() -> dict[str, Any]:
    device = jax.devices()[0]
    packages = (
        "jax",
        "jaxlib",
        "numpy",
        "torch",
        "triton",
        "jax-triton",
        "ejkernel",
        "libtpu",
        "nvidia-cudnn-cu13",
        "flash-attn-4",
        "fastvideo-kernel",
        "nvidia-cutlass-dsl",
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(map(_shown, sys.argv)),
        "commit": _commit(),
        "device": device.device_kind if device.platform != "cpu" else _cpu_name(),
        "platform": device.platform,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: v for name in packages if (v := _version(name))},
    }


def save(name: str, results: Any, where: Path = RESULTS, **extra: Any) -> Path:
    """Write one run atomically; a run of the same name replaces the last one."""
    where.mkdir(parents=True, exist_ok=True)
    path = where / f"{name}.json"
    text = json.dumps({"environment": environment() | extra, "results": results}, indent=1)
    atomic.write_text(path, text + "\n")
    return path


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def find(name: str) -> dict[str, Any] | None:
    """The run, or None if nothing was recorded yet."""
    return load(name) if (RESULTS / f"{name}.json").exists() else None


def load_all(prefix: str) -> dict[str, dict[str, Any]]:
    """The runs whose names begin like this, by their names."""
    return {path.stem: load(path.stem) for path in sorted(RESULTS.glob(f"{prefix}*.json"))}


def _shown(word: str) -> str:
    """A word of a command without the folders of this machine: a script by its path in the checkout."""
    path = Path(word)
    if not path.is_absolute():
        return word
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def _commit() -> str:
    """The commit of the run: $XSAKE_COMMIT, for copies without git, or the commit that git names."""
    if given := os.environ.get("XSAKE_COMMIT"):
        return given
    run = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return run.stdout.strip() or "unknown"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "cpu"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "cpu")
