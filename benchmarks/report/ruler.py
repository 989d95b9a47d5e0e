"""RULER's tasks, made from recorded runs of `python -m benchmarks.ruler`."""

from __future__ import annotations

from typing import Any

from benchmarks import record
from benchmarks.report.hads import MODELS
from benchmarks.report.words import source, table
from benchmarks.ruler.tasks import TASKS

Scores = dict[str, Any]


def ruler() -> str:
    runs = record.load_all("ruler_")
    return "\n\n".join(_run(name, run) for name, run in runs.items())


def _run(name: str, run: dict[str, Any]) -> str:
    by_length: dict[int, list[Scores]] = {}
    for scores in run["scores"]:
        by_length.setdefault(scores["length"], []).append(scores)
    whole = {n: found for n, found in by_length.items() if all(len(s["tasks"]) == len(TASKS) for s in found)}
    parts = [_length(run, n, whole[n]) for n in sorted(whole, reverse=True)]
    cut_off = [_cut_off(n, found) for n, found in by_length.items() if n not in whole]
    return "\n".join([*parts, *cut_off, "", source(f"{name}.json", run, "jax")])


def _length(run: dict[str, Any], length: int, found: list[Scores]) -> str:
    heads = ["task", *map(_way, found)]
    rows = [[task, *(f"{s['tasks'][task]:.0f}" for s in found)] for task in TASKS]
    rows.append(["**average**", *(f"{s['average']:.1f}" for s in found)])
    rows.append(["minus dense", *(_difference(s) for s in found)])
    dense = next(s for s in found if s["method"] == "dense")
    hopeless = [task for task in TASKS if dense["tasks"][task] == 0]
    model = MODELS.get(run["about"]["model"], "SmolLM2, ")
    lines = [
        f"{model}prompts of {length} tokens, {min(s['samples'] for s in found)} per task, scores in "
        "percent; in brackets the 95% interval of the difference, paired by prompt:",
        "",
        *table(heads, rows),
        "",
    ]
    for s in found:
        if s["against_dense"] is None:
            continue
        lost, won = (
            [task for task in TASKS if sign * (s["tasks"][task] - dense["tasks"][task]) > 0] for sign in (-1, 1)
        )
        where = "lies below 0" if s["against_dense"]["high"] < 0 else "does not lie below 0"
        lines.append(
            f"- {_way(s)}: the interval {where}. Lower than dense: {', '.join(lost) or 'no task'}; higher: "
            f"{', '.join(won) or 'no task'}."
        )
    if hopeless:
        lines.append(f"- Dense attention solves nothing of {' and '.join(hopeless)}: these say nothing of a method.")
    return "\n".join(lines)


def _cut_off(length: int, found: list[Scores]) -> str:
    said = ", ".join(f"{_way(s)} {s['average']:.0f} on {len(s['tasks'])}" for s in found)
    return (
        f"- At {length} tokens the run was cut off within the {len(TASKS)} tasks: {said} of them. Too few for a table."
    )


def _way(scores: Scores) -> str:
    return "dense" if scores["method"] == "dense" else f"{scores['method'].upper()} {scores['budget']:.0%}"


def _difference(scores: Scores) -> str:
    d = scores["against_dense"]
    return "" if d is None else f"{d['mean']:+.1f} ({d['low']:+.1f} to {d['high']:+.1f})"
