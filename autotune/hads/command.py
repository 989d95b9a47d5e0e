"""The steps of `xsake autotune --hads`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from rich.console import Console

from xsake import tuning_db
from xsake._measure.isolation import Failed, InProcess, Worker
from xsake.autotune.hads.calls import default_profiles, planned
from xsake.autotune.hads.race import HadsService, decided
from xsake.autotune.problem import DEFAULT_SETS, DTYPES
from xsake.autotune.search.direction import Settings
from xsake.autotune.write import writer
from xsake.hads import HadsProfile


def run(
    *,
    profiles: Sequence[Path],
    budgets: Sequence[float],
    dtype: str | None,
    settings: Settings,
    out: Path | None,
    isolate: bool,
) -> int:
    """Race sparse and dense attention, short calls first, and write an entry for each call as soon as it is decided.

    Returns the exit code: 0 if an entry was written, 3 if the machine was too busy for some of them, else 1.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"{dtype=} must be one of {DTYPES}")
    console, end = Console(), monotonic() + settings.budget
    given = [HadsProfile.load(path) for path in profiles]
    folder = out or tuning_db.user_directory()
    worker = (Worker if isolate else InProcess)(HadsService)
    written = busy = 0
    try:
        facts = worker.call("facts", limit=4 * settings.limit)
        path = folder / tuning_db.file_name(facts.device_kind)
        writer.check_writable(path)
        precision = dtype or DEFAULT_SETS.get(facts.platform, DEFAULT_SETS["cpu"])[2]
        calls = planned(facts.platform, given or default_profiles(facts.platform), budgets, precision)
        console.print(f"{facts.device_kind}: results go to {path}", soft_wrap=True)
        console.print(f"plan: {len(calls)} calls, each sparse and dense in turn, in {settings.budget:g} s at most")
        for number, call in enumerate(calls):
            if monotonic() > end:
                console.print(f"The budget of {settings.budget:g} s is over: {len(calls) - number} calls are left.")
                break
            what = f"{call}, {call.budget:.0%}"
            try:
                outcome = decided(call, worker, facts, rounds=settings.final_rounds, limit=settings.limit)
            except Failed as failure:
                console.print(f"{what}: not raced, {failure}", markup=False, soft_wrap=True)
                continue
            if outcome.entry is None:
                busy += 1
                told = f"nothing written, the machine is busy ({outcome.busy}); it shows {outcome.gain}"
            else:
                environments = {facts.environment_id: facts.environment}
                writer.merge(path, facts.device_kind, [outcome.entry], environments)
                written += 1
                told = f"{outcome.gain}, {'sparse' if outcome.entry.config['sparse'] else 'dense'}"
            console.print(f"{what}: {told}", markup=False, soft_wrap=True)
    finally:
        worker.close()
    console.print(f"{written} races written; `xsake info --hads` shows what a call now runs")
    if busy:
        console.print(f"{busy} races were not calm: run this again when the machine is calm")
    return 3 if busy else 0 if written else 1
