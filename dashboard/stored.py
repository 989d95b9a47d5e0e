"""Recordings and replays on disk: the documents that pages read, as one compressed JSON file each."""

from __future__ import annotations

import contextlib
import json
import lzma
import threading
from pathlib import Path
from typing import Any

from xsake import _atomic
from xsake.dashboard.inside import Outside, read_inside
from xsake.dashboard.problems import NotFound
from xsake.dashboard.run_events import to_json

SUFFIX = ".json.xz"
MOST_PACKED = 64 << 20  # bytes
MOST_UNPACKED = 256 << 20


def write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _atomic.replacing(path) as file:
        file.write(lzma.compress(to_json(document), preset=9))


def read(root: Path, path: Path) -> dict[str, Any]:
    """Raises ValueError, with the reason, if the file is no recording."""
    try:
        packed = read_inside(root, path, MOST_PACKED)
        unpacker = lzma.LZMADecompressor(memlimit=256 << 20)
        data = unpacker.decompress(packed, max_length=MOST_UNPACKED)
        if not unpacker.eof:
            whole = len(data) == MOST_UNPACKED
            raise ValueError(f"it unpacks to more than {MOST_UNPACKED:,} bytes" if whole else "it is cut short")
        document = json.loads(data)
    except (OSError, Outside, lzma.LZMAError, ValueError, RecursionError, EOFError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("about"), dict):
        raise ValueError(f"{path.name} is no recording: it has no description")
    return document


class Shelf:
    """The files of a folder whose names end in `SUFFIX`. The last few that were read stay in memory."""

    def __init__(self, folder: Path | None, kind: str, keep: int = 2):
        self._folder = folder.resolve() if folder is not None and folder.is_dir() else None
        self._kind, self._keep = kind, keep
        self._lock = threading.Lock()
        self._held: dict[str, tuple[Any, dict[str, Any]]] = {}
        self._about: dict[str, tuple[Any, dict[str, Any]]] = {}
        self._broken: dict[str, tuple[Any, str]] = {}  # those that cannot be read, and why

    def names(self) -> list[str]:
        if self._folder is None:
            return []
        return sorted(path.name.removesuffix(SUFFIX) for path in self._folder.glob(f"*{SUFFIX}"))

    def get(self, name: str) -> dict[str, Any]:
        if self._folder is None or name not in self.names():
            raise NotFound(f"there is no {self._kind} {name[:100]!r}; the list says which there are")
        path = self._folder / f"{name}{SUFFIX}"
        try:
            version = path.lstat().st_mtime_ns
            with self._lock:
                held, broken = self._held.get(name), self._broken.get(name)
            if broken is not None and broken[0] == version:
                raise NotFound(broken[1])
            if held is None or held[0] != version:
                held = version, read(self._folder, path)
        except ValueError as error:
            self._broken[name] = version, str(error)
            raise NotFound(str(error)) from error
        except OSError as error:
            raise NotFound(f"{name} cannot be read: {error.strerror}") from error
        with self._lock:
            self._held.pop(name, None)
            self._held[name] = held
            self._about[name] = version, held[1]["about"]
            while len(self._held) > self._keep:
                self._held.pop(next(iter(self._held)))
        return held[1]

    def about(self) -> list[dict[str, Any]]:
        """The descriptions of all files that can be read."""
        found = []
        for name in self.names():
            with contextlib.suppress(NotFound):
                if name not in self._about:
                    self.get(name)
                found.append(self._about[name][1])
        return found
