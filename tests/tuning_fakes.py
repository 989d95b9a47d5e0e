"""A `Service` for the tuner without a device: a configuration does what its `how` says. Workers can import it."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from xsake._measure import isolation
from xsake._measure.closeness import Correctness
from xsake._measure.environment import Facts
from xsake._measure.isolation import InProcess, Worker
from xsake.autotune.measure.contest import Round
from xsake.autotune.problem import Part, Problem, StudyPlan
from xsake.autotune.search.direction import Settings
from xsake.autotune.search.ledger import Ledger
from xsake.autotune.search.storage import open_storage
from xsake.autotune.search.tuner import Tuner
from xsake.autotune.workloads import Workload
from xsake.autotune.write.progress import line
from xsake.tuning_db import Entry, Key

ENVIRONMENT = {"versions": {"xsake": "0", "jax": "0", "jaxlib": "0"}, "python": "3", "machine": "fake", "cores": 2}
KEY = Key.of(
    implementation="xla",
    direction="forward",
    dtype="float32",
    head_dim=16,
    value_dim=16,
    group=1,
    block_q=32,
    block_kv=32,
    causal=True,
    q_len=128,
    kv_len=128,
    heads=2,
    density=1.0,
)
DEFAULT = {"tile": 4, "how": "well"}


def entry(
    chunk: int = 3, *, config=None, kernel="0" * 16, date="2026-01-01", source="measured", **changes: object
) -> Entry:
    about = {"source": source, "kernel": kernel, "date": date, "environment": "e", "speedup": 1.25}
    return Entry(dataclasses.replace(KEY, **changes), config or {"q": 32, "kv": 32, "chunk": chunk}, about)


def part(tile: int, how: str = "well") -> Part:
    return {"tile": tile, "how": how}


class Service(isolation.Service):
    """A configuration takes as many milliseconds as its `tile`; the heuristic's tile is 4."""

    parts = (DEFAULT, part(8), part(2), part(3), part(5))
    directions = ("forward",)
    slowness = 0.0  # seconds that a race really takes

    def healthy(self) -> bool:
        return True  # no device was used, and to open one takes longer than a fake race may

    def facts(self) -> Facts:
        return Facts("Fake 9000", "cpu", ENVIRONMENT)

    def open(self, problem: Problem) -> list[StudyPlan]:
        return [
            StudyPlan(
                key=dataclasses.replace(KEY, direction=direction, density=density),
                densities=(density,),
                true_densities=(density,),
                default=DEFAULT,
                parts=self.parts,
                kernel="0" * 16,
            )
            for direction in self.directions
            for density in problem.densities
        ]

    def compile(self, direction: str, parts: list[Part]) -> list[str | None]:
        for p in parts:
            if p["how"] == "crashes the compiler":
                os.kill(os.getpid(), signal.SIGSEGV)
        return ["ValueError: no such tile" if p["how"] == "does not compile" else None for p in parts]

    def race(self, direction: str, density: float, parts: list[Part]) -> Round:
        time.sleep(self.slowness)
        for p in parts:
            if p["how"] == "hangs":
                time.sleep(1000)
            if p["how"] == "dies":
                os._exit(7)
            if p["how"] == "raises":
                raise RuntimeError("out of memory\nwhile allocating")
        return Round([p["tile"] * 1e-3 for p in parts])

    def verify(self, direction: str, density: float, part: Part) -> Correctness:
        errors = {"out": {"max": 1e-7, "rms": 1e-8, "allowed_max": 1e-6}}
        return Correctness(errors, "out: max error 0.5 (allowed 1e-06)" if part["how"] == "wrong" else None)


class Troubled(Service):
    """Good configurations, and fast ones that fail in every way."""

    parts = (
        DEFAULT,
        part(1, "wrong"),
        part(1, "hangs"),
        part(1, "dies"),
        part(1, "raises"),
        part(1, "does not compile"),
        part(1, "crashes the compiler"),
        part(2),
        part(9),
    )


class Slow(Service):
    slowness = 0.05


class Pair(Service):
    """Neither of two processes compiles before the other has asked for trials: both have a share of every study."""

    def __init__(self, folder: Path):
        self._folder = folder

    def compile(self, direction: str, parts: list[Part]) -> list[str | None]:
        (self._folder / f"asked-{os.getpid()}").touch()
        end = time.monotonic() + 30
        while len(list(self._folder.glob("asked-*"))) < 2:
            assert time.monotonic() < end, "the other process did not come"
            time.sleep(0.01)
        return super().compile(direction, parts)


class WithWorker(Service):
    """Has a worker of its own, as the service on a GPU has several."""

    def __init__(self) -> None:
        self._worker = Worker(Service)

    def child(self) -> int:
        self._worker.call("facts", limit=60.0)
        return self._worker._process.pid


class BadHeuristic(Service):
    parts = (DEFAULT | {"how": "raises"}, part(2))

    def open(self, problem: Problem) -> list[StudyPlan]:
        return [dataclasses.replace(plan, default=self.parts[0]) for plan in super().open(problem)]


PROBLEM = Problem(
    workload=Workload(name="fake", batch=1, q_heads=2, kv_heads=2, length=128, head_dim=16, is_causal=True, block=32),
    dtype="float32",
    densities=(1.0, 0.5),
)
ONE_DENSITY = dataclasses.replace(PROBLEM, densities=(1.0,))


class Quiet:
    """An `Observer` that checks what it is told."""

    def doing(self, what: str, share: float) -> None:
        assert 0 <= share <= 1

    def done(self, result) -> None:
        assert line(result)


def run_tuner(folder: Path, *problems: Problem, service=Service, storage: str = "", isolate=False, **settings) -> Tuner:
    """A tuner after it tuned the problems (`PROBLEM` without any); studies and entries are in `folder`."""
    worker = (Worker if isolate else InProcess)(service)
    try:
        studies = open_storage(storage or folder / "studies.journal")
        tuner = Tuner(worker, studies, folder, Settings(**settings), Quiet())
        tuner.tune(problems or [PROBLEM])
    finally:
        worker.close()
    return tuner


def tune(folder: Path, *problems: Problem, **options) -> Ledger:
    return run_tuner(folder, *problems, **options).ledger


def start(script: Path, code: str, **options) -> subprocess.Popen:
    """A new process that runs `code`, which may import the modules of this folder."""
    script.write_text(f"if __name__ == '__main__':\n{textwrap.indent(code.strip(), '    ')}\n")
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here.parent / "src"), str(here), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths} | options.pop("env", {})
    return subprocess.Popen([sys.executable, str(script)], text=True, env=environment, **options)
