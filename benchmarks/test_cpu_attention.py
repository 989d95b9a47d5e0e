"""Regression gates on a CPU: ratios against jax.nn in the same run, so that the machine's own speed does not matter."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.cpu_attention import Comparison
from xsake._measure.ratio import FEWEST_ROUNDS, Ratio
from xsake._race.case import DIRECTIONS, Case
from xsake._race.contestants import sparse
from xsake._race.verdict import RULED_OUT, judge
from xsake.autotune.workloads import WORKLOADS

pytestmark = pytest.mark.timeout(1200)  # a busy machine gives no verdict, and takes its time
LEAST = {"forward": 5.0, "forward+backward": 4.0}  # surely so many times as fast


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sparse_beats_dense(direction: str) -> None:
    comparison = Comparison(WORKLOADS["cpu4k"], 0.43, direction)
    verdict = judge(comparison.measure, Ratio.of([1 / (LEAST[direction] * RULED_OUT)] * FEWEST_ROUNDS))
    if verdict.told == "no verdict":
        pytest.skip(verdict.reason)
    assert verdict.told == "ok", verdict.reason
    used = comparison.temporary_bytes
    assert used["xsake"] <= 0.1 * used["jax.nn"], used


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sparse_time(benchmark, direction: str) -> None:
    workload = WORKLOADS["cpu4k"]
    run = Case(workload, direction, jnp.float32, calls=1).compiled(sparse, workload.mask(0.43))
    benchmark.pedantic(lambda: jax.block_until_ready(run()), rounds=3, warmup_rounds=1)
