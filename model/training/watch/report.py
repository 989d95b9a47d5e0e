"""Where the events of a run go: the run file, the screen and the trackers that were asked for; from process 0 only."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from xsake.model.training.watch.progress import TrainingProgress
from xsake.model.training.watch.run_file import METRICS_FILE, RunFile
from xsake.model.training.watch.trackers import Trackers, check_trackers


class Report:
    """Writes each event to the run file, the screen and the trackers."""

    def __init__(
        self, run: Path, description: dict[str, Any], *, steps: int, start: int, quiet: bool, track: Sequence[str] = ()
    ):
        self._file: RunFile | None = None
        self._trackers: Trackers | None = None
        self._stack = contextlib.ExitStack()
        check_trackers(track)  # one may not be installed: fail before anything is written
        self._progress = TrainingProgress(steps, start=start, quiet=quiet or jax.process_index() > 0)
        if jax.process_index() > 0:
            return
        process = {"host": socket.gethostname(), "pid": os.getpid()}
        self._file = self._stack.enter_context(RunFile(run / METRICS_FILE, step=start, about={"process": process}))
        if start == 0:
            self._file.write("start", 0, **description, **_circumstances(), process=process)
        self._trackers = self._stack.enter_context(Trackers(track, run, description, start=start))

    def say(self, text: str) -> None:
        """Only on the screen."""
        self._progress.say(text)

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        self._progress.step(step, metrics)
        self._everywhere("step", step, metrics)

    def event(self, event: str, step: int, **values: Any) -> None:
        about = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        self._progress.say(f"step {step}: {event}  {about}")
        self._everywhere(event, step, values)

    def density(self, step: int, layers: list[list[float]] | None) -> None:
        """The share of the blocks that each layer's heads keep from this step on; None for dense attention."""
        if layers is None:
            return
        if self._file is not None:
            self._file.write("density", step, layers=[[round(share, 4) for share in heads] for heads in layers])
        if self._trackers is not None:
            shares = [sum(heads) / len(heads) for heads in layers]
            by_layer = {f"density/layer_{number}": share for number, share in enumerate(shares)}
            self._trackers.log(by_layer | {"density/mean": sum(shares) / len(shares)}, step)

    def failed(self, step: int, reason: str) -> None:
        """The run ends here, and cannot go on by itself."""
        if self._file is not None:
            self._file.write("failed", step, reason=reason)

    def _everywhere(self, event: str, step: int, values: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(event, step, **values)
        if self._trackers is not None:
            self._trackers.log({f"{event}/{name}": value for name, value in values.items()}, step)

    def sync(self) -> None:
        """Wait until all events so far are on disk."""
        if self._file is not None:
            self._file.sync()

    def __enter__(self) -> Report:
        self._stack.enter_context(self._progress)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _circumstances() -> dict[str, Any]:
    """How and where a run was started; not part of what identifies it."""
    device, program = jax.devices()[0], Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name  # of `python -m xsake`: xsake
    return {
        "command": shlex.join([name, *sys.argv[1:]]),
        "environment": {
            "device": device.device_kind,
            "platform": device.platform,
            "devices": jax.device_count(),
            "processes": jax.process_count(),
            "jax": jax.__version__,
            "host": socket.gethostname(),
        },
    }
