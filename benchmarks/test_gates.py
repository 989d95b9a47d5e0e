"""Regression gates over the shared workloads: ratios within one run, against those of a recorded run."""

from __future__ import annotations

import pytest

from benchmarks import gate
from benchmarks.harness.interference import Busy, Slower

KNOWN = gate.recorded()
pytestmark = [
    pytest.mark.timeout(1200),  # a busy machine gives no verdict, and takes its time
    pytest.mark.skipif(
        KNOWN is None,
        reason=f"no {gate.recorded_name()}.json: run python -m benchmarks.gate --record on this kind of device",
    ),
]


@pytest.mark.parametrize("case", gate.cases(), ids=lambda c: c.name)
def test_gate(benchmark, case: gate.Gate) -> None:
    try:
        result = benchmark.pedantic(lambda: gate.check(case, KNOWN), rounds=1)
    except Busy as busy:
        pytest.skip(str(busy))
    benchmark.extra_info.update(result)


def test_a_slowed_kernel_does_not_pass() -> None:
    def slowed(q, k, v, mask):
        """The same result for twice the work."""
        return gate.sparse(gate.sparse(q, k, v, mask) * 0 + q, k, v, mask)

    with pytest.raises((Slower, Busy), match="of dense attention's time"):
        gate.check(gate.cases()[0], KNOWN, slowed)
