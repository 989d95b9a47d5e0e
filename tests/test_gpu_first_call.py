"""The benchmark of first calls, with attention that computes nothing."""

from __future__ import annotations

from benchmarks.gpu.first_call import measure


def test_every_kind_of_call_is_measured_at_every_length():
    found = measure(lambda length: lambda q, k, v: q + k + v, [16, 32], heads=1)
    calls = [f"{how}{what}" for what in ("forward", "gradient") for how in ("outside jit, first ", "jit, first ")]
    calls += [f"outside jit, {what} again" for what in ("forward", "gradient")]
    assert sorted(found) == sorted(calls)
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in found.values())
