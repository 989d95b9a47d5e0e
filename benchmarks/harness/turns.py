"""Turns: benchmarks compile side by side, and race one after the other, alone on the chip (see `gpu/all.py`)."""

from __future__ import annotations

import os
import time
from pathlib import Path

FOLDER, NAME = "XSAKE_TURNS", "XSAKE_TURN"  # environment variables of a benchmark that takes turns with others


def begin() -> None:
    """Called by a benchmark when all that it races is compiled: waits for its turn, if it takes turns."""
    if (folder := os.environ.get(FOLDER)) is None:
        return
    parent, name = os.getppid(), os.environ[NAME]
    ready(Path(folder), name).touch()
    while not turn(Path(folder), name).exists():
        if os.getppid() != parent:
            raise SystemExit("whoever deals out the turns is gone")
        time.sleep(0.1)


def ready(folder: Path, name: str) -> Path:
    return folder / f"{name}.ready"


def turn(folder: Path, name: str) -> Path:
    return folder / f"{name}.turn"
