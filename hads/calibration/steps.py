"""The finished steps of a calibration, on disk, so that a calibration that was stopped goes on with the step in flight.

The folder holds `about.json`, which says what is calibrated, and one file of arrays per step. Every file is written
whole or not at all.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from xsake._ground import atomic
from xsake._ground.read import read_arrays, read_json

_MOST = 1 << 40  # bytes of a step; the calibration itself needs as much memory


class Steps:
    """The steps in `folder`; with None, none are kept. ValueError if the folder holds another calibration's."""

    def __init__(self, folder: str | os.PathLike | None, about: dict[str, Any]):
        self._folder = None if folder is None else Path(folder)
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        file, wanted = self._folder / "about.json", json.loads(json.dumps(about))
        if not file.exists():
            atomic.write_text(file, json.dumps(wanted) + "\n")
        found = read_json(file)
        if other := sorted(name for name in found | wanted if found.get(name) != wanted.get(name)):
            raise ValueError(
                f"{self._folder} has an unfinished calibration that differs in {', '.join(other)}: delete the folder, "
                f"or write the profile elsewhere"
            )

    def get(self, step: str) -> dict[str, np.ndarray] | None:
        """The arrays of a step, or None if it is not finished."""
        path = self._path(step)
        return read_arrays(path, _MOST) if path is not None and path.exists() else None

    def put(self, step: str, arrays: dict[str, Any]) -> None:
        if (path := self._path(step)) is not None:
            with atomic.replacing(path) as file:
                np.savez(file, **arrays)

    def drop(self, step: str) -> None:
        """Delete a step that no later step needs."""
        if (path := self._path(step)) is not None:
            path.unlink(missing_ok=True)

    def _path(self, step: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{step}.npz"
