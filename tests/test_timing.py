"""Races: the contestants' turns, and which part of a turn is timed."""

from __future__ import annotations

import pytest

from xsake._measure import timing
from xsake._measure.timing import Timing, race


@pytest.fixture
def clock(monkeypatch):
    """Time passes where a test says so."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return now


def test_what_a_contestant_leaves_behind_is_not_the_next_ones_time(clock):
    """After `untidy`, the first call of the next contestant is slow; it is not timed."""
    mess = []

    def untidy():
        clock[0] += 1.0
        mess.append(1)

    def tidy():
        clock[0] += 50.0 if mess else 1.0
        mess.clear()

    times = race({"untidy": untidy, "tidy": tidy}, rounds=3, min_seconds=0.0, wait=lambda _: None)
    assert times["tidy"].high == 1.0


def test_quartiles():
    assert Timing.of([3.0, 1.0, 2.0]) == Timing(2.0, 1.5, 2.5, 3)
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0, 1)
    assert Timing(8.0, 4.0, 16.0, 3).per_call(4) == Timing(2.0, 1.0, 4.0, 3)


@pytest.mark.parametrize("min_seconds", [0.0, 0.02])
def test_rounds_last_as_long_as_asked(clock, min_seconds):
    calls = []

    def sleeper():
        calls.append(1)
        clock[0] += 0.001

    race({"sleeper": sleeper}, rounds=2, min_seconds=min_seconds, wait=lambda _: None)
    assert len(calls) == 2 + 2 * (1 + max(1, round(min_seconds / 0.001)))
