"""The steps of `xsake autotune`."""

from __future__ import annotations

import math
from pathlib import Path

import optuna
from rich.console import Console

from xsake import tuning_db
from xsake._measure.environment import Facts
from xsake._measure.isolation import InProcess, Worker
from xsake._op import registry
from xsake._op.tuned import kernel_hash
from xsake.autotune import problem
from xsake.autotune.calls import read_calls
from xsake.autotune.measure.device_service import DeviceService
from xsake.autotune.problem import Problem
from xsake.autotune.search import confirm
from xsake.autotune.search.direction import Settings
from xsake.autotune.search.storage import open_storage
from xsake.autotune.search.tuner import Tuner
from xsake.autotune.write import report, writer
from xsake.autotune.write.progress import Bar
from xsake.tuning_db import Database, Entry

_SECONDS_PER_ENTRY = 20.0  # to compile and race one, about


def run(
    *,
    workloads: list[str] | None,
    from_call: list[str],
    calls: Path | None,
    densities: list[float],
    blocks: list[int] | None,
    dtype: str | None,
    implementation: str | None,
    settings: Settings,
    out: Path | None,
    storage: str | None,
    report_folder: Path | None,
    isolate: bool,
) -> int:
    """Tune, print the results, and return the exit code: 0 if an entry was written, 1 if none, 130 after Ctrl-C."""
    implementation = implementation and registry.name_of(implementation)
    registry.check_name(implementation)
    console = Console()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder = out or tuning_db.user_directory()

    def problems(platform: str) -> list[Problem]:
        names, default_blocks, default_dtype = problem.DEFAULT_SETS.get(platform, problem.DEFAULT_SETS["cpu"])
        precision = dtype or default_dtype
        if calls is not None:
            return read_calls(calls)
        if from_call:
            return [problem.from_call(text, precision, densities, implementation) for text in from_call]
        return problem.named(
            workloads or list(names), blocks or list(default_blocks), densities, precision, implementation
        )

    problems("cpu")  # report wrong options before anything starts
    _make_folder(folder)
    if report_folder is not None:
        from xsake.autotune.write import plots  # noqa: F401 fails here if matplotlib is not installed

        _make_folder(report_folder)
    studies = open_storage(storage or folder / "studies.journal")
    worker, interrupted = (Worker if isolate else InProcess)(DeviceService), False
    try:
        with Bar(console, settings.budget) as bar:
            tuner = Tuner(worker, studies, folder, settings, bar)
            console.print(f"{tuner.facts.device_kind}: results go to {tuner.ledger.path}", soft_wrap=True)
            planned = problems(tuner.facts.platform)
            pairs = sum(len(p.densities) for p in planned)
            names = ", ".join(dict.fromkeys(p.workload.name for p in planned))
            console.print(
                f"plan: {len(planned)} calls ({names}) with {pairs} masks in {settings.budget:g} s at most; every "
                "configuration's numbers are checked before its time counts, which costs a run of each, and dense "
                "attention in float64 once per mask",
                soft_wrap=True,
            )
            try:
                tuner.tune(planned)
            except KeyboardInterrupt:  # finished results are written already, and printed below
                interrupted = True
    except optuna.exceptions.StorageInternalError as error:
        raise OSError(f"the storage of studies failed: {error}".partition("\n")[0]) from error
    finally:
        worker.close()
    for line in tuner.unopened:
        console.print(f"not tuned: {line}", markup=False)
    report.show(tuner.ledger.results, console)
    console.print(f"The checks against the oracle took {tuner.check_seconds:.1f} s.", highlight=False)
    if tuner.cut_short is not None:
        console.print(f"The budget of {settings.budget:g} s is over: {tuner.cut_short}. Another run goes on here.")
    if tuner.ledger.is_disturbed:
        console.print("Some calls have no entry because the machine is busy: run this again when it is calm.")
    if tuner.least_budget is not None:
        minutes = math.ceil(tuner.least_budget / 60)
        console.print(f"{settings.budget:g} s were too short for one entry on this machine: try --budget {minutes}m.")
    if tuner.ledger.has_written:
        console.print(f"To contribute, add to tuning_db/: {tuner.ledger.path}", soft_wrap=True)
        console.print("`xsake info` shows what a call now runs")
    if report_folder is not None:
        console.print(f"report: {report.write(tuner.ledger.results, tuner.facts, report_folder)}", soft_wrap=True)
    if interrupted:
        return 130
    return 0 if tuner.ledger.has_written else 3 if tuner.ledger.is_disturbed else 1


def refresh(*, out: Path | None, isolate: bool) -> int:
    """Race the entries of another driver, JAX or kernel again: renew those that still gain something, drop the others.

    Returns the exit code: 3 if the machine was too busy for some of them, otherwise 0.
    """
    console = Console()
    worker = (Worker if isolate else InProcess)(DeviceService)
    counts = {"renewed": 0, "dropped": 0, "left as they were": 0}
    try:
        facts = worker.call("facts", limit=4 * Settings.limit)
        path = (out or tuning_db.user_directory()) / tuning_db.file_name(facts.device_kind)
        if not path.exists():
            raise ValueError(f"{path} is not there: `xsake autotune` makes it")
        database = Database.read(path)
        old = [entry for entry in database.entries if _is_old(entry, facts)]
        minutes = math.ceil(len(old) * _SECONDS_PER_ENTRY / 60)
        of = f"{len(old)} of {len(database.entries)} entries are of another driver, JAX or kernel"
        console.print(f"{path}: {of}" + (f"; about {minutes}m" if old else ""), soft_wrap=True)
        busy = False
        for finding in confirm.confirm(Database(database.device_kind, old, database.environments), worker):
            console.print(f"{finding.entry.key}: {finding.why}", markup=False, soft_wrap=True)
            what = "left as they were"
            if finding.renewed is not None:
                writer.merge(path, facts.device_kind, [finding.renewed], {facts.environment_id: facts.environment})
                what = "renewed"
            elif finding.state == confirm.REFUTED:
                writer.prune(path, lambda entry, key=finding.entry.key: entry.key != key)  # type: ignore[misc]
                what = "dropped"
            counts[what] += 1
            busy |= finding.state == confirm.BUSY
    finally:
        worker.close()
    console.print(", ".join(f"{n} {what}" for what, n in counts.items()))
    return 3 if busy else 0


def _is_old(entry: Entry, facts: Facts) -> bool:
    name = entry.key.implementation
    if entry.key.operation == tuning_db.HADS:
        return False  # `--hads` races them again
    if not registry.loads(name):
        return True
    return entry.about.get("environment") != facts.environment_id or entry.about.get("kernel") != kernel_hash(name)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{path} cannot be made a folder: {error.strerror}") from error
