"""Jobs: benchmarks in processes of their own, which compile side by side, race in turn, and join their records."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.harness import turns
from xsake._ground import atomic


@dataclasses.dataclass
class Job:
    """One benchmark or a part of one: its process, once it runs, and what became of it."""

    name: str
    command: Sequence[str]
    log: Path
    out: Path | None = None  # the folder of its records, where they are a part of a record
    process: subprocess.Popen | None = None
    compiled: float | None = None  # seconds
    seconds: float | None = None  # of its turn
    status: str = "not run"

    def start(self, environment: Mapping[str, str]) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.out is not None:
            shutil.rmtree(self.out, ignore_errors=True)  # what an earlier run has left is not of this one
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(environment),
                cwd=record.ROOT,
                start_new_session=True,  # so that what it has started ends with it
            )
        self.status = "cut off"

    @property
    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def note_end(self) -> None:
        if self.process is not None and (code := self.process.poll()) is not None:
            self.status = "done" if code == 0 else f"failed with exit code {code}: see {self.log}"


def jobs_of(name: str, parts: Iterable[str], given: str, out: Path, logs: Path) -> list[Job]:
    """The parts of a benchmark, by their options; one where it has no parts, or where `given` says what is measured."""
    words, options = shlex.split(given), [shlex.split(part) for part in parts]
    command = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--out"]
    if not options or any(word in words for part in options for word in part):
        return [Job(name, [*command, str(out), *words], logs / f"{name}.log")]
    jobs = []
    for part in options:
        title = "-".join([name, *(word.replace(" ", "-") for word in part if not word.startswith("--"))])
        own = logs.parent / "parts" / title
        jobs.append(Job(title, [*command, str(own), *part, *words], logs / f"{title}.log", own))
    return jobs


def options_of(known: Collection[str]) -> Callable[[str], tuple[str, str]]:
    """The type of a command line's NAME=OPTIONS, with one of the known names."""

    def parts(text: str) -> tuple[str, str]:
        name, _, options = text.partition("=")
        if name not in known:
            raise argparse.ArgumentTypeError(f"no such benchmark: {name}; there are {', '.join(known)}")
        return name, options

    return parts


def join(jobs: Sequence[Job], out: Path) -> None:
    """Write the records of all parts so far: the first one's environment with all commands, and the results in the
    order of the jobs.
    """
    records: dict[str, list[dict[str, Any]]] = {}
    for job in jobs:
        for path in sorted(job.out.glob("*.json")) if job.out is not None else ():
            records.setdefault(path.name, []).append(json.loads(path.read_text()))
    for name, parts in records.items():
        commands = "; ".join(part["environment"]["command"] for part in parts)
        joined = parts[0] | {
            "environment": parts[0]["environment"] | {"command": commands},
            "results": [result for part in parts for result in part["results"]],
        }
        atomic.write_text(out / name, json.dumps(joined, indent=1) + "\n")


def run(together: Sequence[Job], alone: Sequence[Job], *, deadline: float, out: Path) -> None:
    """Run all jobs until `deadline`, a time of `time.monotonic`."""
    common = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # several are there at a time
    with tempfile.TemporaryDirectory() as name, _stopped_at_the_end([*together, *alone]):
        folder, start = Path(name), time.monotonic()
        for job in together:
            job.start(common | {turns.FOLDER: name, turns.NAME: job.name})
        waiting = list(together)
        print(f"compiling {', '.join(job.name for job in together)}", flush=True)
        while waiting and time.monotonic() < deadline:
            for job in [job for job in waiting if job.ended or turns.ready(folder, job.name).exists()]:
                job.compiled = time.monotonic() - start
                waiting.remove(job)
            time.sleep(0.1)
        for job in [*together, *alone]:
            if time.monotonic() >= deadline:
                break
            begin = time.monotonic()
            if job.process is None:
                job.start(common)
            else:
                turns.turn(folder, job.name).touch()
            while not job.ended and time.monotonic() < deadline:
                time.sleep(0.1)
            job.seconds = time.monotonic() - begin
            job.note_end()
            join(together, out)
            print(f"{job.name}: {job.status} ({job.seconds:.0f} s)", flush=True)


@contextlib.contextmanager
def _stopped_at_the_end(jobs: Sequence[Job]) -> Iterator[None]:
    try:
        yield
    finally:
        for job in jobs:
            job.note_end()
            job.stop()
