"""Checks one after the other in processes of their own, which a kernel may hang or end."""

from __future__ import annotations

import dataclasses
import os
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from xsake._measure.isolation import Caller, Failed, Hung
from xsake.testing.checks import GROUPS, Check, checks_of
from xsake.testing.smallest import SECONDS, by_title
from xsake.testing.target import Target
from xsake.testing.verdict import Checker, Verdict

PARTS = ("forward", "gradients")
INTERPRETED = 4  # times as long may a check take whose kernel is interpreted


@dataclasses.dataclass(frozen=True)
class Checklist:
    """The checks to run, and which parts of each are judged."""

    target: Target
    checks: tuple[Check, ...]
    parts: frozenset[str]


def checklist(target: Target, *, quick: bool, only: list[str]) -> Checklist:
    """`only` names parts or groups; none is all."""
    unknown = [name for name in only if name not in (*PARTS, *GROUPS)]
    if unknown:
        raise ValueError(f"--only {unknown} is unknown; there are {', '.join((*PARTS, *GROUPS))}")
    groups = [name for name in only if name in GROUPS]
    parts = frozenset(name for name in only if name in PARTS) or frozenset(PARTS)
    found = [c for c in checks_of(target, quick=quick) if not groups or c.group in groups]
    return Checklist(target, tuple(found), parts)


class Checkers:
    """Processes that run checks. On a CPU there are two, since most of the time one core compiles."""

    def __init__(self, name: str, *, quick: bool, limit: float, start: Callable[..., Caller]) -> None:
        self._limit, self._factory = limit, partial(Checker, name, quick)
        self._start, self._idle = start, queue.SimpleQueue[Caller]()
        self._all: list[Caller] = []
        self._on_cpu = False
        self._add()

    def _add(self) -> None:
        self._all.append(self._start(self._factory))
        self._idle.put(self._all[-1])

    def target(self) -> Target:
        """The sizes that suit the backend. `Failed` where it supports none, or cannot be imported."""
        (first,) = self._all
        target, platform = first.call("importing", limit=self._limit)
        self._on_cpu = platform == "cpu"
        return target

    def run(self, listed: Checklist) -> Iterator[tuple[Check, Verdict]]:
        """Every check with its verdict, in the order of the list."""
        if self._on_cpu and self._all[0].own_process and len(listed.checks) > 3 and (os.cpu_count() or 1) > 1:
            self._add()
        with ThreadPoolExecutor(len(self._all)) as pool:
            yield from zip(listed.checks, pool.map(partial(self._judge, listed), listed.checks), strict=True)

    def _judge(self, listed: Checklist, check: Check) -> Verdict:
        worker = self._idle.get()
        try:
            limit = self._limit * max(1, check.programs / 4) * (INTERPRETED if listed.target.interpret else 1)
            verdict: Verdict = worker.call("check", check.title, listed.parts, limit=limit)
            if verdict.holds:
                return verdict
            return dataclasses.replace(verdict, code=self._smallest(worker, listed, check, verdict))
        except Failed as failed:
            said = f"{failed}; --limit allows more" if isinstance(failed, Hung) else str(failed)
            wrong: dict[str, Any] = dict.fromkeys(sorted(listed.parts), said)
            return Verdict(**wrong, code=by_title(listed.target, check))
        finally:
            self._idle.put(worker)

    def _smallest(self, worker: Caller, listed: Checklist, check: Check, verdict: Verdict) -> str:
        """A small call that shows it; the check itself where the kernel hangs or dies in smaller calls."""
        try:
            return worker.call("smallest", check.title, verdict, limit=SECONDS + self._limit)
        except Failed:
            return by_title(listed.target, check)

    def close(self) -> None:
        for worker in self._all:
            worker.close()
