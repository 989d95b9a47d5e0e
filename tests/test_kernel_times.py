"""What a GPU does during a call, from a trace's events."""

import jax.numpy as jnp
import pytest

from benchmarks.harness.kernel_times import MOST, kernel_times, summed

GPU, HOST = 1, 2
NAMES = [
    {"ph": "M", "name": "process_name", "pid": GPU, "args": {"name": "/device:GPU:0"}},
    {"ph": "M", "name": "thread_name", "pid": GPU, "tid": 7, "args": {"name": "Stream #7(Compute)"}},
    {"ph": "M", "name": "thread_name", "pid": GPU, "tid": 8, "args": {"name": "XLA Ops"}},
    {"ph": "M", "name": "process_name", "pid": HOST, "args": {"name": "/host:CPU"}},
    {"ph": "M", "name": "thread_name", "pid": HOST, "tid": 7, "args": {"name": "Stream of thoughts"}},
]


def event(name: str, start: float, long: float, pid: int = GPU, tid: int = 7) -> dict:
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start, "dur": long}


def test_kernels_are_added_up_without_their_numbers():
    events = [event("fusion_12", 10, 2), event("fusion_3", 13, 4), event("hads_cut", 20, 5)]
    elsewhere = [event("fusion_12", 0, 100, tid=8), event("python", 0, 100, pid=HOST)]
    found = summed(NAMES + events + elsewhere)
    assert found["launches"] == 3
    assert found["busy"] == pytest.approx(11e-6) and found["span"] == pytest.approx(15e-6)
    assert found["kernels"]["fusion"]["launches"] == 2
    assert found["kernels"]["fusion"]["seconds"] == pytest.approx(6e-6)


def test_short_kernels_are_others():
    events = [event(f"kernel of {n} us", 10 * n, n) for n in range(1, MOST + 3)]
    found = summed(NAMES + events)
    assert found["kernels"]["others"]["launches"] == 2
    assert found["kernels"]["others"]["seconds"] == pytest.approx(3e-6)
    assert sum(kernel["seconds"] for kernel in found["kernels"].values()) == pytest.approx(found["busy"])


def test_nothing_without_a_gpu():
    assert kernel_times(lambda: jnp.zeros(3)) is None
    assert summed(NAMES)["launches"] == 0
