"""Progress on the terminal: what is being tuned, how far it is, how much time is left."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from xsake.autotune.write.result import Result


class Bar:
    """An `Observer` of the tuner; a context manager."""

    def __init__(self, console: Console, budget: float):
        self._end = time.monotonic() + budget
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
        )
        self._task = self._bar.add_task("starting", total=1.0, left="")
        self._start = time.monotonic()

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def doing(self, what: str, share: float) -> None:
        elapsed = time.monotonic() - self._start
        left = min(self._end - time.monotonic(), elapsed / share - elapsed if share else float("inf"))
        text = "" if left == float("inf") else f"about {max(left, 0):.0f} s left"
        self._bar.update(self._task, description=what, completed=share, left=text)

    def done(self, result: Result) -> None:
        self._bar.console.print(line(result))


def line(result: Result) -> str:
    """One line about one study."""
    key = result.plan.key
    density = "?" if key.density is None else f"{key.density:.0%}"
    what = f"{key.direction:8} {key.q_len:>6} x {key.block_q:<3} {density:>5}"
    if result.config is None:
        return f"{what}  nothing written: {result.failure}"
    times = ", ".join(f"{m.default.median * 1e3:.3f} -> {m.tuned.median * 1e3:.3f} ms" for m in result.measured)
    counts = ", ".join(f"{n} {state}" for state, n in sorted(result.counts.items()))
    return f"{what}  {result.speedup:5.2f}x  {times}  ({counts})"
