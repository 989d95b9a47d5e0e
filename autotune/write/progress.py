"""Progress on the terminal: the direction that is being tuned, the share that is done, and the time left."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn

from xsake.autotune.result import Result


class Bar(Progress):
    """An `Observer` of the tuner; a context manager."""

    def __init__(self, console: Console, budget: float):
        columns = (
            "{task.description}",
            BarColumn(),
            "{task.percentage:3.0f}%",
            TimeElapsedColumn(),
            "{task.fields[left]}",
        )
        super().__init__(*columns, console=console)
        self._work = self.add_task("starting", total=1.0, left="")
        self._begin = time.monotonic()
        self._end = self._begin + budget

    def doing(self, what: str, share: float) -> None:
        elapsed = time.monotonic() - self._begin
        left = min(self._end - time.monotonic(), elapsed / share - elapsed if share else float("inf"))
        text = "" if left == float("inf") else f"about {max(left, 0):.0f} s left"
        self.update(self._work, description=what, completed=share, left=text)

    def done(self, result: Result) -> None:
        self.console.print(line(result))


def line(result: Result) -> str:
    """One line about one study."""
    key = result.plan.key
    density = "?" if key.density is None else f"{key.density:.0%}"
    what = f"{key.direction:8} {key.q_len:>6} x {key.block_q:<3} {density:>5}"
    if result.config is None:
        return f"{what}  nothing written: {result.failure}"
    times = ", ".join(f"{m.default.median * 1e3:.3f} -> {m.tuned.median * 1e3:.3f} ms" for m in result.measured)
    counts = ", ".join(f"{n} {state}" for state, n in sorted(result.counts.items()))
    return f"{what}  {result.gain}  {times}  ({counts})"
