"""What a first call costs, from a recorded run of `python -m benchmarks.gpu.first_call`."""

from __future__ import annotations

from typing import Any

from benchmarks import record
from benchmarks.report.words import source, table

NAMES = {"xsake": "xsake", "cudnn": "cuDNN"}
# Seconds under jit with a new shape when the aim was set, which is half of them.
BEFORE = {"jit, first forward": (2.6, 3.7), "jit, first gradient": (6.5, 7.6)}


def gpu_first_call() -> str:
    run = record.load("gpu_first_call")
    by = {(r["call"], r["implementation"]): r for r in run["results"]}
    calls = list(dict.fromkeys(call for call, _ in by))
    lengths = ", ".join(map(str, run["results"][0]["lengths"]))
    lines = [
        f"Seconds until the result is there, {run['results'][0]['heads']} heads of 128, bfloat16, at {lengths} tokens:",
        "",
        *table(
            ["call", *NAMES.values()],
            [[call, *(_seconds(by[call, name]) for name in NAMES)] for call in calls],
        ),
        "",
    ]
    for call, (low, high) in BEFORE.items():
        mine = by[call, "xsake"]["seconds"]
        reached = "Reached" if max(mine) <= high / 2 else "Missed"
        lines.append(
            f"- The aim of {call} is half of {low} to {high} s. {reached}: {min(mine):.1f} to {max(mine):.1f} s."
        )
    return "\n".join([*lines, "", source("gpu_first_call.json", run, "jax")])


def _seconds(row: dict[str, Any]) -> str:
    found = row["seconds"]
    if max(found) < 0.1:
        return f"{min(found) * 1e3:.0f}-{max(found) * 1e3:.0f} ms"
    return f"{min(found):.2f}-{max(found):.2f} s"
