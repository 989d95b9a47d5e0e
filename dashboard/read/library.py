"""Library: the run files in the folders that the user gave, found anew every few seconds."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from xsake.dashboard.read.inside import is_plain_name
from xsake.dashboard.read.run import Run
from xsake.model.training.watch.run_file import METRICS_FILE

DEPTH = 4  # folders below a given one
MOST_FOLDERS = 2000  # visited per search
MOST_RUNS = 500
_PASSED_OVER = {"checkpoints", "node_modules", "__pycache__", "site-packages", "build", "dist"}


class Given(NamedTuple):
    """A folder or a run file that the user named; `recorded` if it comes with the project."""

    root: Path  # a resolved folder
    file: Path | None = None
    recorded: bool = False

    @classmethod
    def of(cls, path: Path, *, recorded: bool = False) -> Given:
        """Raises ValueError if there is neither a folder nor a run file."""
        real = path.resolve()
        if real.is_dir():
            return cls(real, recorded=recorded)
        if real.is_file() and real.suffix == ".jsonl":
            return cls(real.parent, real, recorded)
        raise ValueError(f"{path} is neither a folder nor a run file (.jsonl): give folders of runs, or of run folders")


class Found(NamedTuple):
    root: Path
    path: Path
    name: str
    shown_path: str
    recorded: bool


class Library:
    """Finds runs and keeps one `Run` for each, with an id that does not change while the server lives."""

    def __init__(self, given: list[Given]):
        self.given = given
        self.lock = threading.RLock()
        self._by_path: dict[Path, Run] = {}
        self._by_id: dict[str, Run] = {}
        self.searched = False
        self._searching = threading.Lock()  # one at a time: an older search would drop what a newer one found
        self._next_look = 0.0

    def search(self) -> bool:
        """Look for runs that appeared or vanished; returns whether there were any."""
        with self._searching:
            return self._search()

    def _search(self) -> bool:
        began = time.monotonic()
        found = {one.path: one for given in self.given for one in find_runs(given)}
        with self.lock:
            new = [one for path, one in found.items() if path not in self._by_path]
            # Not found need not be gone: a search ends early on a slow disk, or without a file descriptor left.
            vanished = [path for path, run in self._by_path.items() if path not in found and run.is_gone()]
            for path in vanished:
                self._by_path.pop(path).gone = True  # its id stays taken, and tells that it is gone
            for one in new[: max(MOST_RUNS - len(self._by_path), 0)]:
                self._add(one)
            self.searched = True
            now = time.monotonic()
            self._next_look = now + 10 * (now - began)
            return bool(new or vanished)

    def _add(self, one: Found) -> None:
        identity = self._new_id(one)
        run = Run(
            identity=identity,
            name=_readable(one.name),
            shown_path=_readable(one.shown_path),
            root=one.root,
            path=one.path,
            recorded=one.recorded,
        )
        self._by_path[one.path] = self._by_id[identity] = run

    def _new_id(self, one: Found) -> str:
        plain = re.sub(r"[^A-Za-z0-9._-]", "_", one.name)[:80].lstrip(".") or "run"
        tried, number = plain, 1
        while tried in self._by_id and not self._same_place(tried, one):
            number += 1
            tried = f"{plain}~{number}"
        return tried

    def _same_place(self, identity: str, one: Found) -> bool:
        """A run that was deleted and is there again takes its old id."""
        run = self._by_id[identity]
        return run.gone and run.shown_path == _readable(one.shown_path)

    @property
    def runs(self) -> list[Run]:
        with self.lock:
            return list(self._by_path.values())

    def get(self, identity: str) -> Run | None:
        """The run of this id, also if it is gone by now."""
        with self.lock:
            return self._by_id.get(identity)

    def find(self, identity: str) -> Run | None:
        """`get`, after a search if the run is not known: it may have begun since the last one.

        Wrong ids make the server search for a tenth of the time at most.
        """
        asked = time.monotonic()
        if (run := self.get(identity)) is not None or asked < self._next_look:
            return run
        with self._searching:
            if asked >= self._next_look:  # else another request has searched meanwhile
                self._search()
        return self.get(identity)

    def update(self, most: int = 8 << 20) -> list[Run]:
        """Read what is new in every run, about `most` bytes of each; returns the runs that changed."""
        return [run for run in self.runs if run.update(most)]


def find_runs(given: Given) -> Iterator[Found]:
    """The runs of a given folder: every folder with a metrics file, and for records every run file."""
    if given.file is not None:
        yield Found(given.root, given.file, given.file.stem, given.file.name, given.recorded)
        return
    if given.recorded:
        for path in sorted(given.root.glob("*/*.jsonl")):
            if not path.is_symlink():
                yield Found(given.root, path, path.stem, str(path.relative_to(given.root)), True)
        return
    deadline = time.monotonic() + 5  # a slow disk must not stop the rest
    waiting, visited = [(given.root, 0)], 0
    while waiting and visited < MOST_FOLDERS and time.monotonic() < deadline:
        folder, depth = waiting.pop(0)
        visited += 1
        entries: list[os.DirEntry[str]] = []
        with contextlib.suppress(OSError), os.scandir(folder) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
        if any(entry.name == METRICS_FILE for entry in entries):
            inside = folder.relative_to(given.root)
            shown = str(given.root.name / inside) if folder != given.root else folder.name
            yield Found(given.root, folder / METRICS_FILE, folder.name or "run", shown, False)
        elif depth < DEPTH:
            for entry in entries:
                if is_plain_name(entry.name) and entry.name not in _PASSED_OVER and _is_folder(entry):
                    waiting.append((folder / entry.name, depth + 1))


def find_files(root: Path, suffix: str) -> list[Path]:
    """Plain files with this suffix in a folder and in its direct subfolders."""
    found = [*root.glob(f"*{suffix}"), *root.glob(f"*/*{suffix}")]
    return sorted(path for path in found if path.is_file() and not path.is_symlink())[:100]


def _readable(name: str) -> str:
    """A file's name as text; bytes that are not UTF-8 become question marks."""
    return name.encode("utf-8", "replace").decode()


def _is_folder(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        return entry.is_dir(follow_symlinks=False)
    return False
