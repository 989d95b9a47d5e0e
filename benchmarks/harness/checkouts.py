"""Another state of this project beside the checkout at hand: a commit, or a folder that holds one."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from benchmarks.record import ROOT


@contextlib.contextmanager
def checkout(which: str) -> Iterator[Path]:
    """The root of a checkout: the folder `which`, or that commit, unpacked for as long as the context lasts."""
    if (folder := Path(which)).is_dir():
        if not (folder / "src" / "xsake").is_dir():
            raise SystemExit(f"{which} is a folder without src/xsake: name a checkout of xsake, or a commit")
        yield folder.resolve()
        return
    archive = subprocess.run(["git", "archive", which], cwd=ROOT, capture_output=True)
    if archive.returncode:
        raise SystemExit(f"{which} is neither a folder nor a commit here: {archive.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory(prefix="xsake-") as folder_of_commit:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder_of_commit, filter="data")
        yield Path(folder_of_commit)


def environment(root: Path) -> dict[str, str]:
    """Environment of a process that imports `xsake` from `root`, and `benchmarks` and `tests` from this checkout."""
    path = [str(root / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def of_this_checkout(path: str) -> ModuleType:
    """The module in a file of this checkout, in a process whose `xsake` may be the other checkout's.

    From then on this process has it under its name, also where the other checkout has none of that name.
    """
    name = ".".join(Path(path).relative_to("src").with_suffix("").parts)
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
