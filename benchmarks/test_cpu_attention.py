"""Regression gates on a CPU: ratios against jax.nn in the same run, so that the machine's own speed does not matter."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.cpu_attention import Comparison
from xsake._measure.ratio import FEWEST_ROUNDS, Ratio
from xsake._race.contestants import sparse
from xsake._race.course import DIRECTIONS, Course
from xsake._race.slowdown import RULED_OUT, slowdown_since
from xsake.autotune.workloads import WORKLOADS

pytestmark = pytest.mark.timeout(1200)  # a busy machine gives no verdict, and takes its time
LEAST = {"forward": 5.0, "forward+backward": 4.0}  # surely so many times as fast


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sparse_beats_dense(direction: str) -> None:
    comparison = Comparison(WORKLOADS["cpu4k"], 0.43, direction)
    allowed = Ratio.of([1 / (LEAST[direction] * RULED_OUT)] * FEWEST_ROUNDS)
    slowdown = slowdown_since(allowed, comparison.measure)
    if slowdown.told == "no verdict":
        pytest.skip(slowdown.reason)
    assert slowdown.told == "ok", slowdown.reason
    used = comparison.temporary_bytes
    assert used["xsake"] <= 0.1 * used["jax.nn"], used


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sparse_time(benchmark, direction: str) -> None:
    workload = WORKLOADS["cpu4k"]
    run = Course(workload, direction, jnp.float32, calls=1).compiled(sparse, workload.mask(0.43))
    benchmark.pedantic(lambda: jax.block_until_ready(run()), rounds=3, warmup_rounds=1)
