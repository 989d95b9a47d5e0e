"""Recordings and replays on disk: the documents that pages read, as one compressed JSON file each."""

from __future__ import annotations

import contextlib
import json
import lzma
from functools import lru_cache
from pathlib import Path
from typing import Any

from xsake._ground import atomic
from xsake.dashboard.read.inside import Outside, read_inside
from xsake.dashboard.read.run_events import to_json
from xsake.dashboard.serve.problems import NotFound

SUFFIX = ".json.xz"
MOST_PACKED = 64 << 20  # bytes
MOST_UNPACKED = 256 << 20


def write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.replacing(path) as file:
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
        self._given, self._kind = folder, kind
        # By folder, path and version: a file that changed is read anew. Files that cannot be read are remembered too.
        self._document = lru_cache(keep)(lambda root, path, version: read(root, path))
        self._description = lru_cache(1000)(self._describe)

    @property
    def _folder(self) -> Path | None:
        """Looked at each time, since it may appear after the server started; None if it is not there, or leads out."""
        if self._given is None or not self._given.is_dir():
            return None
        real = self._given.resolve()
        return real if real.is_relative_to(self._given.parent.resolve()) else None

    def names(self) -> list[str]:
        folder = self._folder
        return sorted(path.name.removesuffix(SUFFIX) for path in folder.glob(f"*{SUFFIX}")) if folder else []

    def _place(self, name: str) -> tuple[Path, Path, int]:
        folder = self._folder
        if folder is None or name not in self.names():
            raise NotFound(f"there is no {self._kind} {name[:100]!r}; the list says which there are")
        path = folder / f"{name}{SUFFIX}"
        try:
            return folder, path, path.lstat().st_mtime_ns
        except OSError as error:
            raise NotFound(f"{name} cannot be read: {error.strerror}") from error

    def _describe(self, *place: Any) -> dict[str, Any] | str:
        """The file's description, or why the file cannot be read."""
        try:
            return self._document(*place)["about"]
        except ValueError as error:
            return str(error)

    def get(self, name: str) -> dict[str, Any]:
        place = self._place(name)
        if isinstance(reason := self._description(*place), str):
            raise NotFound(reason)
        return self._document(*place)

    def about(self) -> list[dict[str, Any]]:
        """The descriptions of all files that can be read."""
        found = []
        for name in self.names():
            with contextlib.suppress(NotFound):
                found.append(self._description(*self._place(name)))
        return [one for one in found if isinstance(one, dict)]
