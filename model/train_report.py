"""Where the events of a run go: the run file, the screen and, if asked for, Weights & Biases; from process 0 only."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from xsake.model.progress import TrainingProgress
from xsake.model.run_file import METRICS_FILE, RunFile


class Report:
    """Writes each event to the run file, the screen and Weights & Biases."""

    def __init__(self, run: Path, description: dict[str, Any], *, steps: int, start: int, quiet: bool, wandb: bool):
        self._file: RunFile | None = None
        self._wandb: Any = None
        self._stack = contextlib.ExitStack()
        if wandb:  # wandb may not be installed: fail before anything is written
            self._wandb = _import_wandb()
        self._progress = TrainingProgress(steps, start=start, quiet=quiet or jax.process_index() > 0)
        if jax.process_index() > 0:
            self._wandb = None
            return
        self._file = self._stack.enter_context(RunFile(run / METRICS_FILE, step=start))
        if start == 0:
            self._file.write("start", 0, **description)
        if self._wandb is not None:
            self._stack.enter_context(self._wandb.init(project="xsake", name=run.name, dir=run, config=description))

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        self._progress.step(step, metrics)
        self._everywhere("step", step, metrics)

    def event(self, event: str, step: int, **values: Any) -> None:
        about = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        self._progress.say(f"step {step}: {event}  {about}")
        self._everywhere(event, step, values)

    def _everywhere(self, event: str, step: int, values: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(event, step, **values)
        if self._wandb is not None:
            self._wandb.log({f"{event}/{name}": value for name, value in values.items()}, step=step)

    def sync(self) -> None:
        """Wait until all events so far are on disk."""
        if self._file is not None:
            self._file.sync()

    def __enter__(self) -> Report:
        self._stack.enter_context(self._progress)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ValueError("wandb was asked for and is not installed: pip install wandb") from error
    return wandb
