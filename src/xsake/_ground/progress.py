"""How far a long command is: a bar, or lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LINE_SECONDS = 10


@contextmanager
def shown_progress(*, err: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A bar that says what is being done; in a log a line where work begins or ends, and every few seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=err)
    if not console.is_terminal:
        yield _Lines(err).say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("")
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of)


class _Lines:
    """Progress for a log."""

    def __init__(self, err: bool) -> None:
        self._err = err
        self._start = self._last = time.monotonic()
        self._begun: set[str] = set()

    def say(self, what: str, done: int, of: int) -> None:
        now = time.monotonic()
        if done == of or what not in self._begun or now - self._last >= _LINE_SECONDS:
            self._last = now
            self._begun.add(what)
            file = sys.stderr if self._err else sys.stdout
            print(f"{what}: {done} of {of}, after {now - self._start:.0f} s", file=file, flush=True)
