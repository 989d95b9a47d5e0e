"""The progress of a training run on the screen: a bar, or lines where there is no terminal."""

from __future__ import annotations

import datetime
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINES = 20  # in a run without a terminal


class TrainingProgress:
    """A bar on a terminal, some lines elsewhere, and nothing with `quiet`."""

    def __init__(self, steps: int, *, start: int, quiet: bool = False):
        self._console = Console(quiet=quiet)
        self._steps, self._start = steps, start
        self._begun = 0.0  # when the first step of this process ended: it compiles
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[about]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=steps, completed=start, about="")

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        about = describe(metrics)
        self._bar.update(self._task, completed=step, about=about)
        taken = step - self._start
        if taken == 1:
            self._begun = time.monotonic()
        if self._bar.disable and (taken == 1 or step % max(1, self._steps // _LINES) == 0):
            self.say(f"step {step}/{self._steps} {about}{self._left(taken)}")

    def _left(self, taken: int) -> str:
        """The time that the other steps will take, evaluations and calibrations as often as so far."""
        if taken == 1:
            return ""
        seconds = (time.monotonic() - self._begun) / (taken - 1) * (self._steps - self._start - taken)
        return f"  {datetime.timedelta(seconds=round(seconds))} left"

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.stop()


def describe(metrics: dict[str, Any]) -> str:
    """Loss, tokens/s and, where it is known, MFU.

    >>> describe({"loss": 2.5, "tokens_per_second": 12345.6, "mfu": None})
    'loss 2.500  12,346 tokens/s'
    """
    parts = [f"loss {metrics['loss']:.3f}", f"{metrics['tokens_per_second']:,.0f} tokens/s"]
    if metrics["mfu"] is not None:
        parts.append(f"MFU {metrics['mfu']:.1%}")
    return "  ".join(parts)
