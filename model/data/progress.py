"""The progress of a build of token files, kept on disk so that a stopped build goes on from there.

The folder `OUT.part` holds tokenizer.json and the token files that are finished, and `progress.json`:

    {"settings": {...}, "sources": "6f0c...", "places": {"train": {"files": 3, "text": 41, "rest": 7}, "held": ...}}
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xsake._ground import atomic

_FILE = "progress.json"
_SPLITS = ("train", "held")


def part_of(out: Path) -> Path:
    """The folder in which `out` is built."""
    return out.with_name(out.name + ".part")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a split's finished files end: `rest` tokens before the end of text number `text`."""

    files: int = 0
    text: int = -1
    rest: int = 0

    def lacks(self, number: int) -> bool:
        """Whether the files lack tokens of this text."""
        return number > self.text or (number == self.text and self.rest > 0)

    def rest_of(self, number: int, tokens: np.ndarray) -> np.ndarray:
        """The tokens of this text that the files lack."""
        return tokens[tokens.size - self.rest :] if number == self.text else tokens


class Progress:
    """The folder of an unfinished build, locked by one process. A build of other texts or settings empties it first."""

    def __init__(self, out: Path, paths: Sequence[Path], settings: Mapping[str, Any]):
        self.folder, self._out = part_of(out), out
        self._build = {"settings": dict(settings), "sources": _fingerprint(paths)}
        self.places = dict.fromkeys(_SPLITS, Place())

    def __enter__(self) -> Progress:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            if not self._alone():
                raise FileExistsError(f"another process builds {self._out}; nothing was overwritten")
            self._resume()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def _alone(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
        return not self._out.exists()  # it exists if another process has just finished the build

    def __exit__(self, *error: Any) -> None:
        os.close(self._lock)

    def _resume(self) -> None:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads((self.folder / _FILE).read_text())
            if {name: found[name] for name in self._build} == self._build:
                self.places = {split: Place(**found["places"][split]) for split in _SPLITS}
                return
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.save(self.places)

    def save(self, places: Mapping[str, Place]) -> None:
        """Call this when a token file is finished: a build that is stopped then goes on after that file."""
        noted = {split: dataclasses.asdict(place) for split, place in places.items()}
        atomic.write_text(self.folder / _FILE, json.dumps(self._build | {"places": noted}) + "\n")

    def finish(self) -> None:
        """Rename the folder of the unfinished build to `out`."""
        self.folder.rename(self._out)
        (self._out / _FILE).unlink()


def _fingerprint(paths: Sequence[Path]) -> str:
    """A hash of the texts' names, sizes and modification times."""
    about = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(json.dumps(about).encode(errors="replace")).hexdigest()
