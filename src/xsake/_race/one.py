"""One race: a workload and a mask, contestants that are checked against the oracle, and their times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xsake._race import entrants
from xsake._race.case import BOTH, FORWARD, Case
from xsake._race.nvidia_smi import Monitor
from xsake._race.sustained import sustained_race, sustained_row
from xsake.autotune.measure import verify
from xsake.autotune.measure.interference import contention, disturbance
from xsake.autotune.measure.isolation import Caller, Failed, Service
from xsake.autotune.measure.timing import race
from xsake.autotune.problem import Problem, from_call

MOST_CHECKED = {"gpu": 2**34}  # elements of one group's logits that the oracle computes, by platform
_FEWER = 2**28
_RESULTS = {FORWARD: ("out",), BOTH: ("d_query", "d_key", "d_value")}


@dataclasses.dataclass(frozen=True)
class Finished:
    """A race in one direction: a row per contestant, why others do not race, and what disturbed the race or None."""

    direction: str
    density: float
    rows: list[dict[str, Any]]
    reasons: dict[str, str]
    disturbed: str | None


class RaceService(Service):
    """The service in the process that races a shape at one density. Its parent must not open the device."""

    def __init__(self, shape: str, density: float) -> None:
        self._on_cpu = jax.default_backend() == "cpu"
        problem = parsed(shape, density, usual_dtype())
        (density,) = problem.densities  # type: ignore[assignment]
        self._workload = problem.workload
        self._mask = problem.workload.mask(density)
        calls = 1 if self._on_cpu else None
        self._cases = {d: Case(problem.workload, d, problem.dtype, calls=calls) for d in (FORWARD, BOTH)}
        self._runs: dict[tuple[str, str], Callable[[], Any]] = {}
        self._yardsticks: dict[str, verify.Yardstick] | None = None

    def device(self) -> str:
        return jax.devices()[0].device_kind

    def prepare(self, name: str, direction: str) -> dict[str, dict[str, float]]:
        """Compile a contestant and run it. Returns the errors of its results, {} where they are not comparable."""
        run = entrants.entrant(name, self._cases[direction], self._mask)
        results = run()
        entrants.waiter([name])(results)
        self._runs[direction, name] = run
        if entrants.is_dense(name) and float(self._mask.density()) < 1:
            return {}
        return self._errors(direction, results)

    def _errors(self, direction: str, results: Any) -> dict[str, dict[str, float]]:
        group = self._workload.q_heads // self._workload.kv_heads
        elements = group * self._workload.length * (self._workload.kv_length or self._workload.length)
        if elements > MOST_CHECKED.get(jax.default_backend(), _FEWER):
            return {}
        if self._yardsticks is None:
            case = self._cases[BOTH]
            self._yardsticks = verify.yardsticks(*case.inputs, case.cotangent, self._mask)
        found = {}
        for name, x in zip(_RESULTS[direction], jax.tree.leaves(results), strict=True):
            yardstick = self._yardsticks[name]
            _, tokens, heads, _ = yardstick.exact.shape
            found[name] = yardstick.errors(np.asarray(_tokens_first(x, tokens)[-1:, :, -heads:]))
        return found

    def race(self, direction: str, names: list[str], rounds: int) -> tuple[list[dict[str, Any]], float, str | None]:
        """Rows of the contestants, the mask's true density, and what disturbed the race."""
        case, runs = self._cases[direction], {name: self._runs[direction, name] for name in names}
        with Monitor() as monitor, contention() as contended:
            found = sustained_race(runs, rounds, entrants.waiter(names), monitor)
        flops = {name: case.flops(None if entrants.is_dense(name) else self._mask) for name in names}
        rows = [{"contestant": n} | sustained_row(found[n], case.calls, flops[n]) for n in names]
        times = {name: found[name]["sustained"] for name in names}
        return rows, float(self._mask.density()), disturbance(times, contended)

    def peak(self) -> float:
        """Operations per second of a large product of matrices in the workload's precision."""
        size = 1024 if self._on_cpu else 8192
        x = jnp.ones((size, size), self._cases[FORWARD].dtype)
        product = jax.jit(lambda x: jnp.dot(x, x))
        return 2.0 * size**3 / race({"product": lambda: product(x)}, rounds=5)["product"].low


def service(shape: str, density: float) -> Callable[[], RaceService]:
    """What makes the service in the process."""
    return partial(RaceService, shape, density)


def parsed(shape: str, density: float, dtype: str) -> Problem:
    """ValueError for a shape that is none, before anything starts."""
    return from_call(shape, dtype, [density], None)


def usual_dtype() -> str:
    """The precision of this process's device where the shape names none."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def _tokens_first(x: Any, tokens: int) -> jax.Array:
    """A result of so many tokens as a JAX array [B, tokens, H, D]; torch's peers may have the heads first."""
    array = x if isinstance(x, jax.Array) else jnp.from_dlpack(x.detach())
    return array if array.shape[1] == tokens else array.swapaxes(1, 2)


def run(worker: Caller, names: list[str], direction: str, *, rounds: int, limit: float) -> Finished:
    """Prepare the contestants, each of which may fail, and race the others.

    Raises ValueError with the reasons where all fail, and `Failed` if the race itself fails.
    """
    errors: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name in names:
        before = worker.restarts
        try:
            errors[name] = worker.call("prepare", name, direction, limit=limit)
        except Failed as failed:
            reasons[name] = reason(failed)
        if worker.restarts != before:  # what was prepared in the old process is lost
            for other in errors:
                worker.call("prepare", other, direction, limit=limit)
    for name, found in errors.items():
        wrong = [n for n, e in found.items() if not e["max"] <= e["allowed_max"]]
        if wrong:
            worst = ", ".join(f"{n} by {found[n]['max']:.2g} ({found[n]['allowed_max']:.2g} allowed)" for n in wrong)
            reasons[name] = f"wrong: beside the oracle {worst}"
    racing = [name for name in errors if name not in reasons]
    if not racing:
        every = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        raise ValueError(f"no contestant can race {direction}: {every}")
    rows, density, disturbed = worker.call("race", direction, racing, rounds, limit=60 * limit)
    for row in rows:
        row["errors"] = errors[row["contestant"]]
    return Finished(direction, density, rows, reasons, disturbed)


def reason(failed: Failed) -> str:
    """Why something could not be measured, in one line."""
    kind, _, text = " ".join(str(failed).split()).partition(": ")
    return (text if kind in ("ModuleNotFoundError", "NotImplementedError") else f"{kind}: {text}")[:300]
