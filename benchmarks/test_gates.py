"""Regression gates over the shared workloads: ratios within one run, against those of a recorded run."""

from __future__ import annotations

import pytest

from benchmarks.harness import gates
from xsake._race.verdict import Busy, Slower

KNOWN = gates.recorded()
pytestmark = [
    pytest.mark.timeout(1200),  # a busy machine gives no verdict, and takes its time
    pytest.mark.skipif(
        KNOWN is None,
        reason=f"no {gates.recorded_name()}.json: run python -m benchmarks.gate --record on this kind of device",
    ),
]


@pytest.mark.parametrize("case", gates.cases(), ids=lambda c: c.name)
def test_gate(benchmark, case: gates.Gate) -> None:
    try:
        result = benchmark.pedantic(lambda: gates.check(case, KNOWN), rounds=1)
    except Busy as busy:
        pytest.skip(str(busy))
    benchmark.extra_info.update(result)


def test_a_slowed_kernel_does_not_pass() -> None:
    def slowed(q, k, v, mask):
        """The same result for twice the work."""
        return gates.sparse(gates.sparse(q, k, v, mask) * 0 + q, k, v, mask)

    with pytest.raises((Slower, Busy), match="of dense attention's time"):
        gates.check(gates.cases()[0], KNOWN, slowed)
