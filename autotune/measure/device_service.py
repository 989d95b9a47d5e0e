"""The service on the device: compiles, races and verifies configurations, in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from xsake._ground.device import target_gpu
from xsake._measure.closeness import Correctness
from xsake._measure.isolation import Service
from xsake.autotune.measure.contest import COMPILERS, Contest, Round
from xsake.autotune.measure.lowering import MOST_CHILDREN, Lowering
from xsake.autotune.problem import Part, Problem, StudyPlan


class DeviceService(Service):
    """Holds one problem at a time: `open` the problem, then compile, race and verify its directions one by one."""

    def __init__(self, *, round_seconds: float | None = None) -> None:
        self._round_seconds = round_seconds or (0.1 if jax.default_backend() == "cpu" else 0.02)
        self._contest: Contest | None = None
        self._lowering: Lowering | None = None

    def close(self) -> None:
        if self._lowering is not None:
            self._lowering.close()

    def open(self, problem: Problem) -> list[StudyPlan]:
        self._contest = None  # free the memory of the previous problem first
        self._lowering = self._lowering or _lowering()  # the children start while the data are made
        self._contest = Contest(problem, self._round_seconds, self._lowering)
        self._contest.prepare()
        return self._contest.plans

    @property
    def contest(self) -> Contest:
        if self._contest is None:
            raise RuntimeError("open a problem first")
        return self._contest

    def compile(self, direction: str, parts: Sequence[Part]) -> list[str | None]:
        return self.contest.compile(direction, parts)

    def race(self, direction: str, density: float | None, parts: Sequence[Part]) -> Round:
        return self.contest.race(direction, density, parts)

    def verify(self, direction: str, density: float | None, part: Part) -> Correctness:
        return self.contest.verify(direction, density, part)


def _lowering() -> Lowering | None:
    """None where lowering is quick, as for a CPU, or where there are too few cores."""
    gpu, children = target_gpu(), min(MOST_CHILDREN, COMPILERS)
    return Lowering(gpu, children) if jax.default_backend() == "gpu" and gpu is not None and children > 1 else None
