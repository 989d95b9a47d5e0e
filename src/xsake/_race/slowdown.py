"""Whether a call is slower than it was, told from a busy machine and from times too far apart to tell anything."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Literal

from xsake._measure.interference import ATTEMPTS
from xsake._measure.ratio import Ratio
from xsake._race.paired import Paired

LEAST = 1.05  # a smaller slowdown is let through, however surely it is shown
RULED_OUT = 1.1  # a call is as fast as it was if it is surely not so many times slower
PATIENCE = 120.0  # seconds after which nothing is measured again on a busy machine


class Busy(Exception):
    """The machine was busy in every measurement."""


@dataclasses.dataclass(frozen=True)
class Slowdown:
    """`ratio` is the call's ratio now over the ratio then; None where no measurement was calm."""

    told: Literal["ok", "slower", "no verdict"]
    ratio: Ratio | None
    reason: str


def calm(measure: Callable[[], Paired], enough: Callable[[Ratio], bool]) -> Paired:
    """The rounds of all calm measurements; measures until they are `enough`, ATTEMPTS times at most. Raises `Busy`."""
    found = None
    busy: list[str] = []
    end = time.monotonic() + PATIENCE
    for _ in range(ATTEMPTS):
        paired = measure()
        if paired.disturbed is None:
            found = paired if found is None else found + paired
        else:
            busy.append(paired.disturbed)
        if (found is not None and enough(found.ratio)) or (busy and time.monotonic() > end):
            break
    if found is None:
        raise Busy(f"the machine is busy ({busy[0]})")
    return found


def slowdown_since(then: Ratio, measure: Callable[[], Paired]) -> Slowdown:
    """Whether a call takes longer, over its reference, than it took then.

    It is slower if the whole interval of the slowdown is above LEAST after all measurements, and as fast if the whole
    interval is below RULED_OUT. Everything else is no verdict: a busy machine, or an interval that is too wide.
    """
    try:
        ratio = calm(measure, lambda now: _is_as_fast(now.over(then))).ratio.over(then)
    except Busy as busy:
        return Slowdown("no verdict", None, str(busy))
    between = f"surely between {ratio.low:.2f}x and {ratio.high:.2f}x"
    if ratio.low > LEAST:
        return Slowdown("slower", ratio, f"{ratio.median:.2f}x of the recorded time, {between}")
    if _is_as_fast(ratio):
        return Slowdown("ok", ratio, "")
    told = f"the rounds are too far apart: {between} of the recorded time; give more --rounds"
    return Slowdown("no verdict", ratio, told)


def _is_as_fast(ratio: Ratio) -> bool:
    return ratio.low <= LEAST and ratio.high < RULED_OUT
