"""Verdicts on speed that tell a slower program from a busy machine: they wait for a calm measurement."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from xsake._measure.interference import ATTEMPTS

PATIENCE = 120.0  # seconds after which nothing is measured again


class Slower(AssertionError):
    """Slower than allowed, in a calm measurement, and in every repetition."""


class Busy(Exception):
    """Slower than allowed in every measurement, but the machine was busy in each: no verdict."""


def judge(measure: Callable[[], dict[str, Any]], slowness: Callable[[dict[str, Any]], str | None]) -> dict[str, Any]:
    """The first result that is not slower than allowed.

    `measure` gives a result, whose "disturbed" says what disturbed it or is None; `slowness` says why a result is
    slower than allowed, or None. After a slower result, `measure` is called again, ATTEMPTS times at most and not after
    PATIENCE seconds on a busy machine. Raises `Slower` if one of the slower results was calm, and `Busy` otherwise.
    """
    calm: list[str] = []
    busy: list[str] = []
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
