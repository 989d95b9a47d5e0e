"""One race: a workload and a mask, contestants that are checked against the oracle, and their times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from xsake._measure import verify
from xsake._measure.closeness import Correctness, Yardstick
from xsake._measure.environment import Facts
from xsake._measure.interference import Contention, disturbance
from xsake._measure.isolation import Caller, Failed, Service, reason
from xsake._measure.nvidia_smi import Monitor
from xsake._measure.timing import race
from xsake._race import contestants
from xsake._race.course import BOTH, FORWARD, Course
from xsake._race.sustained import Racer, Turn, raced, sustained_row
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


@dataclasses.dataclass(frozen=True)
class Ready:
    """A contestant that is compiled, and ran once.

    `correctness` is None where its results are not comparable, `flops` are those of a call, of which a run makes
    `calls`.
    """

    correctness: Correctness | None
    turn_seconds: float
    flops: float
    calls: int


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where and in which precision a race is; the peak is the rate of a large product of matrices there."""

    facts: Facts
    dtype: str
    peak_tflops: float

    def __str__(self) -> str:
        at = self.facts.environment
        driver = f", driver {at['driver']}" if at.get("driver") else ""
        return f"{at.get('processor', self.facts.device_kind)}{driver}, jax {at['versions']['jax']}"


class RaceService(Service):
    """The service in the process that races a shape at one density. Its parent must not open the device."""

    def __init__(self, shape: str, density: float) -> None:
        self._on_cpu = jax.default_backend() == "cpu"
        problem = parsed(shape, density, usual_dtype())
        (density,) = problem.densities  # type: ignore[assignment]
        self._workload = problem.workload
        self._mask = problem.workload.mask(density)
        calls = 1 if self._on_cpu else None
        self._courses = {d: Course(problem.workload, d, problem.dtype, calls=calls) for d in (FORWARD, BOTH)}
        self._racers: dict[tuple[str, str], Racer] = {}
        self._yardsticks: dict[str, Yardstick] | None = None

    def setting(self) -> Setting:
        return Setting(self.facts(), str(jnp.dtype(self._courses[FORWARD].dtype)), self._peak())

    def density(self) -> float:
        return float(self._mask.density())

    def prepare(self, name: str, direction: str, checked: bool) -> Ready:
        """Compile a contestant and run it."""
        course, is_dense = self._courses[direction], contestants.is_dense(name)
        run, wait = contestants.contestant(name, course, self._mask), contestants.waiter(name)
        results = run()
        wait(results)
        comparable = not is_dense or self.density() == 1
        found = self._correctness(direction, results) if checked and comparable else None
        self._racers[direction, name] = racer = Racer(run, wait)
        return Ready(found, racer.turn_seconds, course.flops(None if is_dense else self._mask), course.calls)

    def _correctness(self, direction: str, results: Any) -> Correctness | None:
        """None where the call is too long for the oracle."""
        group = self._workload.q_heads // self._workload.kv_heads
        elements = group * self._workload.length * (self._workload.kv_length or self._workload.length)
        if elements > MOST_CHECKED.get(jax.default_backend(), _FEWER):
            return None
        if self._yardsticks is None:
            course = self._courses[BOTH]
            self._yardsticks = verify.yardsticks(*course.inputs, course.cotangent, self._mask)
        found = {}
        for name, x in zip(_RESULTS[direction], jax.tree.leaves(results), strict=True):
            _, tokens, heads, _ = self._yardsticks[name].exact.shape
            found[name] = _tokens_first(x, tokens)[-1:, :, -heads:]
        return Correctness.of(found, self._yardsticks)

    def turn(self, name: str, direction: str) -> Turn:
        return self._racers[direction, name].turn()

    def _peak(self) -> float:
        """TFLOP/s of a large product of matrices in the race's precision."""
        size = 1024 if self._on_cpu else 8192
        x = jnp.ones((size, size), self._courses[FORWARD].dtype)
        product = jax.jit(lambda x: jnp.dot(x, x))
        return 2e-12 * size**3 / race({"product": lambda: product(x)}, rounds=5)["product"].low


def service(shape: str, density: float) -> Callable[[], RaceService]:
    """What makes the service in its process."""
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


class _Field:
    """The contestants that are ready in the worker. Any of them may fall out, at any time."""

    def __init__(self, worker: Caller, direction: str, limit: float) -> None:
        self._worker, self._direction, self._limit = worker, direction, limit
        self.ready: dict[str, Ready] = {}
        self.reasons: dict[str, str] = {}  # of those that fell out

    def prepare(self, name: str) -> None:
        found: Ready | None = self._call("prepare", name, True, limit=self._limit)
        if found is None:
            return
        if found.correctness is not None and found.correctness.problem is not None:
            self.reasons[name] = f"wrong beside the oracle: {found.correctness.problem}"
        else:
            self.ready[name] = found

    def turn(self, name: str) -> Turn | None:
        if name not in self.ready:
            return None
        return self._call("turn", name, limit=self._limit + 4 * self.ready[name].turn_seconds)

    def _call(self, method: str, name: str, *more: Any, limit: float) -> Any:
        """The worker's answer, or None where the contestant falls out. A new process prepares the others again."""
        before = self._worker.restarts
        try:
            return self._worker.call(method, name, self._direction, *more, limit=limit)
        except Failed as failed:
            self.reasons[name] = reason(failed)
            self.ready.pop(name, None)
        if self._worker.restarts != before:
            for other in list(self.ready):
                if other in self.ready:  # it may have fallen out meanwhile
                    self._call("prepare", other, False, limit=self._limit)
        return None


def run(worker: Caller, names: list[str], direction: str, *, rounds: int, limit: float) -> Finished:
    """Prepare the contestants, and race them. A contestant that fails falls out, and the others race on.

    Raises ValueError with the reasons where all fail.
    """
    field = _Field(worker, direction, limit)
    for name in names:
        field.prepare(name)
    with Monitor(worker.call("facts", limit=limit).gpu) as monitor:
        found = raced(list(field.ready), field.turn, rounds, monitor)
    # A contestant may also fall out after its last turn, when a new process cannot prepare it.
    found = {name: times for name, times in found.items() if name in field.ready}
    if not found:
        every = "; ".join(f"{name}: {why}" for name, why in field.reasons.items())
        raise ValueError(f"no contestant can race {direction}: {every}")
    rows = []
    for name, times in found.items():
        ready = field.ready[name]
        row = {"contestant": name} | sustained_row(times, ready.calls, ready.flops)
        rows.append(row | {"errors": ready.correctness.errors if ready.correctness is not None else {}})
    contended = sum((times["contended"] for times in found.values()), Contention())
    disturbed = disturbance({name: times["sustained"] for name, times in found.items()}, contended)
    return Finished(direction, worker.call("density", limit=limit), rows, field.reasons, disturbed)
