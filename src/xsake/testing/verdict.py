"""A check's verdict, and the process in which checks are run: one that a kernel may hang or end."""

from __future__ import annotations

import dataclasses
import os
from functools import cached_property

import jax

from xsake._measure.isolation import Service
from xsake._op import registry
from xsake._op.registry import Unsupported
from xsake.testing import smallest
from xsake.testing.checks import CHECKS, FORWARD, GRADIENTS, Check, NotHere, Unsteady
from xsake.testing.target import Target, target_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is wrong with the forward and with the gradients, each in a line or None; or why the check was not run:
    the backend `refused` the call, or this machine cannot run the check (`not_here`).

    `results` are those that are wrong, `code` the smallest call that shows it, and `unsteady` says that runs of one
    program differ. `ended`: an error ended the check before it compared results, and `at` is the line of the backend
    that raised it. `no_gradients` is why the backend has none for a call
    whose forward holds.
    """

    forward: str | None = None
    gradients: str | None = None
    refused: str | None = None
    not_here: str | None = None
    no_gradients: str | None = None
    results: tuple[str, ...] = ()
    unsteady: bool = False
    ended: bool = False
    at: str | None = None
    code: str = ""

    @property
    def holds(self) -> bool:
        return self.forward is None and self.gradients is None

    @property
    def not_run(self) -> str | None:
        return self.refused or self.not_here


def judge(target: Target, check: Check, parts: frozenset[str]) -> Verdict:
    """Run a check; `parts` of "forward" and "gradients" are judged."""
    return _judge(target, check, parts)[0]


def _judge(target: Target, check: Check, parts: frozenset[str]) -> tuple[Verdict, Exception | None]:
    """The verdict, and the error that ended the check."""
    found = _found(target, check, forward_only="gradients" not in parts)
    told: dict[str, str | None] = {"forward": None, "gradients": None}
    results: list[str] = []
    for name, problem in found.problems.items():
        part = "forward" if name in FORWARD else "gradients"
        if found.ended is not None and part not in parts:
            (part,) = parts  # nothing was compared: the part that was asked for does not hold either
        if part in parts:
            told[part] = told[part] or problem
            results.append(name)
    verdict = Verdict(
        forward=told["forward"],
        gradients=told["gradients"],
        refused=found.refused,
        not_here=found.not_here,
        no_gradients=found.no_gradients,
        results=tuple(results),
        unsteady=found.unsteady,
        ended=found.ended is not None,
        at=found.at,
    )
    return verdict, found.ended


def assert_holds(target: Target, check: Check) -> None:
    """The verdict of `xsake check` in pytest: AssertionError with what is wrong, a skip with the reason for a refusal.

    Where a backend has no gradients for the call, its forward must hold. An error of the kernel is the assertion's
    cause, with its traceback.
    """
    import pytest

    verdict, ended = _judge(target, check, frozenset({"forward", "gradients"}))
    if verdict.not_run is not None:
        pytest.skip(verdict.not_run)
    if not verdict.holds:
        raise AssertionError("\n".join(filter(None, (verdict.forward, verdict.gradients, verdict.at)))) from ended


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Found:
    """What is wrong with each result; or why the check was not run; or why there are no gradients.

    `ended`: the error that ended the check before results were compared, `at` a line of the backend.
    """

    problems: dict[str, str] = dataclasses.field(default_factory=dict)
    ended: Exception | None = None
    at: str | None = None
    refused: str | None = None
    not_here: str | None = None
    no_gradients: str | None = None
    unsteady: bool = False


def _found(target: Target, check: Check, *, forward_only: bool) -> _Found:
    try:
        return _Found(problems=check.problems(target, forward_only=forward_only))
    except NotHere as reason:
        return _Found(not_here=str(reason))
    except Unsupported as refusal:
        return _Found(refused=_one_line(refusal.reasons[target.name]))
    except Exception as error:
        ended = error
    at, said = registry.raised_in(target.name, ended), _one_line(str(ended))
    if isinstance(ended, AssertionError) and at is None and said:  # of the check itself
        named = said.partition(" ")[0].rstrip(":") in (*FORWARD, *GRADIENTS)
        problems = {"d_query" if said.startswith("d_") else "out": said}
        return _Found(problems=problems, ended=None if named else ended, unsteady=isinstance(ended, Unsteady))
    raised = f"raises {type(ended).__name__}" + (f": {said}" if said else "")
    if forward_only:
        return _Found(problems={"out": raised}, ended=ended, at=at)
    forward = _found(target, check, forward_only=True)
    if forward.problems or forward.refused or forward.not_here:
        return forward
    if isinstance(ended, NotImplementedError):
        return _Found(no_gradients=said)
    return _Found(problems={"d_query": raised}, ended=ended, at=at)


def _one_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[0] if lines else ""


class Checker(Service):
    """The service in the process that runs checks on a backend."""

    def __init__(self, name: str, quick: bool) -> None:
        flags = ["--xla_force_host_platform_device_count=2"]  # for meshes
        flags += ["--xla_backend_optimization_level=0"] if quick else []  # most of the time goes into compiling
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
        self._name, self._judged = name, 0

    @cached_property
    def target(self) -> Target:
        return target_of(self._name)

    def importing(self) -> tuple[Target, str]:
        """The backend's target, and the platform of this process: the parent must not open the device, nor import a
        backend. A backend that hangs is told by this name: "importing did not end within 60 s"."""
        return self.target, jax.default_backend()

    def check(self, title: str, parts: frozenset[str]) -> Verdict:
        self._judged += 1
        if self._judged % 30 == 0:
            jax.clear_caches()  # programs of hundreds of checks would fill the memory
        verdict = judge(self.target, CHECKS[title], parts)
        if not verdict.holds and not self.healthy():
            raise RuntimeError(f"the device answers no more; {verdict.forward or verdict.gradients}")
        return verdict

    def smallest(self, title: str, verdict: Verdict) -> str:
        """A small call that shows what is wrong with the results of a check."""
        return smallest.code(self.target, CHECKS[title], verdict.results, again=verdict.unsteady)
