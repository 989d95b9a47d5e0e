"""All benchmarks of this GPU, one command: compiled side by side, raced one after the other, alone on the chip.

    python -m benchmarks.gpu.all --record                       all of them, into benchmarks/results
    python -m benchmarks.gpu.all --out DIR --minutes 20         as far as twenty minutes go, into DIR
    python -m benchmarks.gpu.all --out DIR --only peers,decode
    python -m benchmarks.gpu.all --out DIR --give selection="--peers ejkernel" --give peers="--rounds 3"

Benchmarks that compile everything before they race begin together, large ones in several parts: a process compiles one
program at a time. When all of them have compiled, they race in turn; then the others run, one after the other. What
each prints is in DIR/logs. Parts write to DIR/parts as they go (with --record, both are in out/), and their records are
joined when a part has ended, so that a run that is cut off keeps what it has measured. A benchmark that fails does not
stop the others.
"""

from __future__ import annotations

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.harness import turns
from benchmarks.harness.script import listed, parser, show
from xsake._ground import atomic

# Those that call `turns.begin`, and the options of their parts.
TOGETHER = {
    "peers": (
        *(f"--only llama32k --masks {masks}" for masks in ("random", "sink", "lines")),
        *(f"--only {workload}" for workload in ("full16k", "odd10k_d96", "mla16k", "smollm8k")),
        # One mask each: a peer that fails takes its process with it.
        *(f"--only {name} --masks 'random {d}%'" for name in ("gpt4k", "gpt4k_d64") for d in (43, 10, 100)),
    ),
    "blocks": ("--only llama32k", "--only full16k"),
    "selection": ("--tokens 65536", "--tokens 32768", "--tokens 8192"),
    "prompt": ("--models qwen2.5-1.5b", "--models smollm2-135m"),
    "attention": tuple(f"--only {workload}" for workload in ("gpt4k", "gpt4k_d64", "llama32k", "full16k")),
    "generate": ("--batches 1", "--batches 8", "--batches 32"),
}
ALONE = ("decode", "packing", "hops", "mask_cost", "first_call", "accuracy", "sanitize")


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


def jobs_of(name: str, given: str, out: Path, logs: Path) -> list[Job]:
    """The parts of a benchmark; one where it has no parts, or where the options given say what is measured."""
    words = shlex.split(given)
    parts = [shlex.split(part) for part in TOGETHER.get(name, ())]
    if any(word in words for part in parts for word in part):
        parts = []
    command = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--out"]
    if not parts:
        return [Job(name, [*command, str(out), *words], logs / f"{name}.log")]
    jobs = []
    for part in parts:
        title = "-".join([name, *(word.replace(" ", "-") for word in part if not word.startswith("--"))])
        own = logs.parent / "parts" / title
        jobs.append(Job(title, [*command, str(own), *part, *words], logs / f"{title}.log", own))
    return jobs


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


def main() -> None:
    options = parser(__doc__)
    known = (*TOGETHER, *ALONE)
    options.add_argument("--only", type=listed(among=known), default=[*known], help="some of them")
    options.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    options.add_argument(
        "--give", action="append", default=[], metavar="NAME=OPTIONS", help="more options of a benchmark"
    )
    args = options.parse_args()
    more = dict(one.partition("=")[::2] for one in args.give)
    if unknown := sorted({*more} - {*known}):
        options.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(known)}")
    if args.out is None:
        options.error("say where the records go: --record or --out DIR")
    out = args.out.resolve()
    logs = (record.ROOT / "out" if args.out == record.RESULTS else out) / "logs"
    together, alone = (
        [job for name in names if name in args.only for job in jobs_of(name, more.get(name, ""), out, logs)]
        for names in (TOGETHER, ALONE)
    )
    deadline, jobs = time.monotonic() + 60 * args.minutes, [*together, *alone]
    run(together, alone, deadline=deadline, out=out)
    numbers = [["" if x is None else f"{x:.0f}" for x in (job.compiled, job.seconds)] for job in jobs]
    lines = [[job.name, *times, job.status] for job, times in zip(jobs, numbers, strict=True)]
    show(["benchmark", "compiled after, s", "turn, s", "what became of it"], lines)
    sys.exit(any(job.status != "done" for job in jobs))


if __name__ == "__main__":
    main()
