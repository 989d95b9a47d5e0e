"""What disturbs a measurement: threads that wait for a core, and times that are far apart."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
from collections.abc import Callable, Iterator, Mapping

import jax

from xsake._measure.timing import Timing

ATTEMPTS = 3  # a disturbed measurement is repeated until it was made so many times
SPREAD = 0.2  # a measurement is not calm if its quartiles are further apart, over the median
WAITED = 0.25  # nor if threads waited more seconds for a core per second that they ran


@dataclasses.dataclass
class Contention:
    """Seconds that this process's threads ran, and seconds that they waited for a core."""

    ran: float = 0.0
    waited: float = 0.0

    @property
    def share(self) -> float:
        return self.waited / self.ran if self.ran > 0 else 0.0

    @property
    def is_high(self) -> bool:
        return self.share > WAITED

    def __add__(self, other: Contention) -> Contention:
        return Contention(self.ran + other.ran, self.waited + other.waited)


@contextlib.contextmanager
def contention() -> Iterator[Contention]:
    """The contention inside the context, filled in at its end.

    It is 0 where another device does the work, and on systems that do not tell (Linux does).
    """
    found = Contention()
    if jax.default_backend() != "cpu":
        yield found
        return
    before = _thread_seconds()
    yield found
    for thread, (ran, waited) in _thread_seconds().items():
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
    """Why a race was not calm, or None."""
    if contended.is_high:
        return f"threads waited for a core {contended.share:.2f} s for each second that they ran"
    name, timing = max(times.items(), key=lambda item: _spread(item[1]))
    if _spread(timing) > SPREAD:
        return f"the quartiles of {name!r} are {_spread(timing):.0%} of its median apart"
    return None


def calm_first[R](race: Callable[[], R], is_busy: Callable[[R], bool], rounds: int) -> list[R]:
    """So many calm rounds. A busy round is raced again, until as many were busy as are asked for; then all count."""
    calm: list[R] = []
    busy: list[R] = []
    while len(calm) < rounds and len(busy) < rounds:
        one = race()
        (busy if is_busy(one) else calm).append(one)
    return calm if len(calm) == rounds else [*calm, *busy]


def _spread(timing: Timing) -> float:
    return (timing.high - timing.low) / timing.median
