"""Regression gates: the time of a call over that of a reference in the same run, against the ratio of a recorded run.

    python -m benchmarks.gate             measure and compare
    python -m benchmarks.gate --record    measure and write benchmarks/results/gates_<device>.json

A machine's own speed is in both times, and cancels. `make bench` runs the same under pytest.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import xsake
from benchmarks import record
from xsake import tuning_db
from xsake.autotune.timing import race
from xsake.autotune.workloads import WORKLOADS, Workload

MARGIN = 1.25  # a ratio may be so many times the recorded one
SLOWER = 1.1  # and what was tuned so many times the heuristic
DIRECTIONS = ("forward", "forward+backward")


@dataclasses.dataclass(frozen=True)
class Case:
    workload: Workload
    density: float
    direction: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.workload.name} {self.density:g} {self.direction}"


def cases() -> list[Case]:
    """By platform: few enough for a minute or two."""
    names, dtype = (("gpt4k", "gpt4k_d64", "llama32k", "full16k"), "bfloat16")
    if jax.default_backend() == "cpu":
        names, dtype = ("cpu4k",), "float32"
    return [Case(WORKLOADS[n], d, direction, dtype) for n in names for d in (0.43, 0.1) for direction in DIRECTIONS]


class Regression(AssertionError):
    """Slower than the gate lets through."""


def sparse(q: Array, k: Array, v: Array, mask: xsake.BlockMask) -> Array:
    return xsake.attention(q, k, v, mask)


def measure(case: Case, attend: Callable = sparse, *, rounds: int = 5, round_seconds: float = 0.2) -> dict[str, Any]:
    """Ratios of a call (with what was tuned) to dense attention and to the heuristic, all in one race."""
    implementation = "xla" if jax.default_backend() == "cpu" else "cudnn"
    inputs, mask = case.workload.inputs(case.dtype), case.workload.mask(case.density)

    def dense(q: Array, k: Array, v: Array, mask: xsake.BlockMask) -> Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=case.workload.is_causal, implementation=implementation)

    def program(attend: Callable) -> Callable:
        cotangent = jax.random.normal(jax.random.key(9), inputs[0].shape, jnp.float32).astype(case.dtype)

        def both(q: Array, k: Array, v: Array, mask: xsake.BlockMask) -> tuple:
            return jax.vjp(lambda *x: attend(*x, mask), q, k, v)[1](cotangent)

        compiled = jax.jit(attend if case.direction == "forward" else both).lower(*inputs, mask).compile()
        return lambda: compiled(*inputs, mask)

    contestants = {"xsake": program(attend), "dense": program(dense)}
    with tuning_db.heuristics_only():
        contestants["heuristic"] = program(attend)
    times = race(contestants, rounds=rounds, min_seconds=round_seconds)
    ours = times["xsake"].median
    return {
        "name": case.name,
        "over_dense": ours / times["dense"].median,
        "over_heuristic": ours / times["heuristic"].median,
        "seconds": {who: dataclasses.asdict(t) for who, t in times.items()},
    }


def recorded_name() -> str:
    return f"gates_{tuning_db.file_name(jax.devices()[0].device_kind).removesuffix('.json')}"


def recorded() -> dict[str, dict[str, Any]] | None:
    """Results by name, or None where this kind of device has none."""
    try:
        return {r["name"]: r for r in record.load(recorded_name())["results"]}
    except FileNotFoundError:
        return None


def check(result: dict[str, Any], known: dict[str, dict[str, Any]]) -> None:
    """Raises `Regression` past the margins."""
    name, now = result["name"], result["over_dense"]
    if name not in known:
        raise KeyError(f"{name!r} has no recorded ratio: run python -m benchmarks.gate --record")
    then = known[name]["over_dense"]
    if now > MARGIN * then:
        raise Regression(
            f"{name}: {now:.3f} of dense attention's time; {then:.3f} were recorded, {MARGIN}x are let through"
        )
    if result["over_heuristic"] > SLOWER:
        raise Regression(f"{name}: what was tuned takes {result['over_heuristic']:.2f} of the heuristic's time")


def main() -> None:
    known, results = recorded(), []
    for case in cases():
        results.append(measure(case))
        then = f" (recorded {known[case.name]['over_dense']:.3f})" if known and case.name in known else ""
        print(
            f"{case.name}: {results[-1]['over_dense']:.3f} of dense{then}, "
            f"{results[-1]['over_heuristic']:.3f} of the heuristic",
            flush=True,
        )
    if "--record" in sys.argv:
        print(f"recorded in {record.save(recorded_name(), results).relative_to(record.ROOT)}")
    elif known is not None:
        for result in results:
            check(result, known)


if __name__ == "__main__":
    main()
