"""Tell a slower program from a busy machine: what disturbs a measurement, and verdicts that wait for a calm one."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from xsake.autotune.measure.timing import Timing

ATTEMPTS = 3
PATIENCE = 120.0  # seconds after which nothing is measured again
SPREAD = 0.2  # a measurement is not calm if its quartiles are further apart, over the median
WAITED = 0.25  # nor if threads waited more seconds for a core per second that they ran


class Slower(AssertionError):
    """Slower than allowed, in a calm measurement, and in every repetition."""


class Busy(Exception):
    """Slower than allowed in every measurement, but the machine was busy in each: no verdict."""


@dataclasses.dataclass
class Contention:
    """Seconds that this process's threads ran, and seconds that they waited for a core."""

    ran: float = 0.0
    waited: float = 0.0

    @property
    def share(self) -> float:
        return self.waited / self.ran if self.ran > 0 else 0.0


@contextlib.contextmanager
def contention() -> Iterator[Contention]:
    """The contention inside the context, filled in at its end; 0 on systems that do not tell (Linux does)."""
    found, before = Contention(), _thread_seconds()
    yield found
    after = _thread_seconds()
    for thread, (ran, waited) in after.items():
        ran_before, waited_before = before.get(thread, (0.0, 0.0))
        found.ran, found.waited = found.ran + ran - ran_before, found.waited + waited - waited_before


def _thread_seconds() -> dict[str, tuple[float, float]]:
    found = {}
    for path in glob.glob("/proc/self/task/*/schedstat"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:  # a thread may end meanwhile
            ran, waited, _ = file.read().split()
            found[path] = int(ran) / 1e9, int(waited) / 1e9
    return found


def disturbance(times: Mapping[str, Timing], contended: Contention) -> str | None:
    """Why a race was not calm, or None. Waiting for cores counts on the CPU backend only."""
    if jax.default_backend() == "cpu" and contended.share > WAITED:
        return f"threads waited for a core {contended.share:.2f} s for each second that they ran"
    name, timing = max(times.items(), key=lambda item: _spread(item[1]))
    if _spread(timing) > SPREAD:
        return f"the quartiles of {name!r} are {_spread(timing):.0%} of its median apart"
    return None


def _spread(timing: Timing) -> float:
    return (timing.high - timing.low) / timing.median


def judge(measure: Callable[[], dict[str, Any]], slowness: Callable[[dict[str, Any]], str | None]) -> dict[str, Any]:
    """The first result that is not slower than allowed.

    `measure` gives a result, whose "disturbed" says what disturbed it or is None; `slowness` says why a result is
    slower than allowed, or None. After a slower result, `measure` is called again, ATTEMPTS times at most and not after
    PATIENCE seconds on a busy machine. Raises `Slower` if one of the slower results was calm, and `Busy` otherwise.
    """
    calm, busy = [], []
    end = time.monotonic() + PATIENCE
    while len(calm) + len(busy) < ATTEMPTS and not (busy and time.monotonic() > end):
        result = measure()
        why = slowness(result)
        if why is None:
            return result
        if result["disturbed"] is None:
            calm.append(why)
        else:
            busy.append(f"{why}; {result['disturbed']}")
    if calm:
        raise Slower(calm[0])
    raise Busy(f"the machine is busy: no verdict ({busy[0]})")
