"""`xsake showcase`: the pages as static files with the recorded data inside. No server is needed, nor any network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from xsake._ground import atomic
from xsake.dashboard.read.run_events import to_json
from xsake.dashboard.serve.command import checkout
from xsake.dashboard.show.documents import Documents

PAGES = Path(__file__).parents[1] / "static"
MARK = "<!-- showcase -->"  # in index.html, where a static page loads the description of itself
MOST_BYTES = 5 << 20
_MADE = "xsake-showcase.json"  # lies in a folder that this command made, and that it may therefore replace


def build(documents: Documents, out: Path, *, pages: Path = PAGES) -> dict[str, int]:
    """Write the site to the folder `out`, whole or not at all; returns the bytes of each part.

    Raises ValueError if `out` holds something else, or the pages are not built.
    """
    if not (pages / "index.html").is_file():
        raise ValueError(f"the pages are not built: {pages} has no index.html; run `make web`")
    index = (pages / "index.html").read_text()
    if index.count(MARK) != 1:
        raise ValueError(f"{pages / 'index.html'} must have the line {MARK} once: build the pages again")
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / _MADE).is_file())):
        raise ValueError(f"{out} holds something else than a showcase; nothing was changed: give another folder")
    documents.library.search()
    while documents.library.update():
        pass
    out.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        with atomic.naming(out):
            _copy(pages, new)
            (new / "index.html").write_text(index.replace(MARK, '<script defer src="api/site.js"></script>'))
            sizes = {"pages": sum(path.stat().st_size for path in new.rglob("*") if path.is_file())}
            for name, document in documents.everything():
                if name == "api/site":
                    document = document | {"commit": commit()}
                size = _write(new, name, document)
                part = name.split("/")[1]
                sizes[part] = sizes.get(part, 0) + size
            (new / _MADE).write_text(json.dumps({"bytes": sizes}, indent=1) + "\n")
            new.chmod(0o755)
            _replace(new, out)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return sizes


def _write(folder: Path, name: str, document: dict[str, Any]) -> int:
    """One document as a script that assigns it: pages opened from file:// may load scripts, and nothing else."""
    path = folder / f"{name}.js"
    body = b"(window.XSAKE_DATA ??= {})[" + to_json(name) + b"] = " + to_json(document) + b";\n"
    _write_bytes(path, body)
    return len(body)


def _copy(pages: Path, new: Path) -> None:
    for page in pages.rglob("*"):  # shutil.copytree would tell a full disk once per page, in a list
        if page.is_file():
            _write_bytes(new / page.relative_to(pages), page.read_bytes())


def _write_bytes(path: Path, body: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)


def _replace(new: Path, out: Path) -> None:
    """Put the new folder in the place of the old one."""
    old = None
    if out.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}-old-", dir=out.parent))
        os.rename(out, old / "site")
    os.rename(new, out)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def commit() -> str | None:
    """The commit of the checkout, if this is one."""
    if given := os.environ.get("XSAKE_COMMIT"):
        return given
    folder = checkout()
    if folder is None or not (folder / ".git").exists():
        return None
    try:
        run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True)
    except OSError:
        return None
    return run.stdout.strip() or None
