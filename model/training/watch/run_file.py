"""The run file: one JSON object per event and line; each step is there once, also after kills and resumes."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

from xsake._ground import atomic

METRICS_FILE = "metrics.jsonl"  # in the folder of a run
CHECKPOINTS_FOLDER = "checkpoints"


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a run file. Lines that a kill cut off, or that are no events, are left out."""
    if not path.exists():
        return []
    events = []
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and isinstance(event.get("step"), int) and "event" in event:
                events.append(event)
    return events


class RunFile:
    """Appends events to a run's file, after removing events later than `step`, the checkpoint that the run resumes.

    `about` is added to the event "resumed".
    """

    def __init__(self, path: Path, *, step: int, about: dict[str, Any] | None = None):
        self._path = path
        events = read_events(path)
        kept = [event for event in events if event["step"] <= step] if step else []
        if len(kept) < len(events) or (path.exists() and not path.read_bytes().endswith(b"\n")):
            atomic.write_text(path, "".join(json.dumps(event) + "\n" for event in kept))
        self._file: TextIO = open(path, "a")  # noqa: SIM115 (open for the life of the run)
        if step:
            self.write("resumed", step, **(about or {}))

    def write(self, event: str, step: int, **values: Any) -> None:
        """`step` is the number of steps taken when the event happened, `time` its date in seconds since 1970."""
        now = round(time.time(), 3)
        with atomic.naming(self._path):
            self._file.write(json.dumps({"event": event, "step": step, **values, "time": now}) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Wait until the events are on disk, so that a checkpoint never holds a step that the file lacks."""
        with atomic.naming(self._path):
            os.fsync(self._file.fileno())

    def __enter__(self) -> RunFile:
        return self

    def __exit__(self, *error: Any) -> None:
        with atomic.naming(self._path):  # what a full disk did not take is tried again
            self._file.close()
