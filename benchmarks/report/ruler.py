"""RULER's tasks, made from recorded runs of `python -m benchmarks.ruler`."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.report.hads import MODELS, plain
from benchmarks.report.words import source, table, went_on
from benchmarks.ruler.summary import difference
from benchmarks.ruler.tasks import TASKS
from xsake.hads.study.bootstrap import Difference

AIMS = {0.2: 2, 0.1: 5}  # by budget: points that HADS may lose
Scores = dict[str, Any]
Answers = Callable[[int, str, float], dict[str, float]]  # of (length, method, budget): scores by prompt


def ruler() -> str:
    runs = record.load_all("ruler_")
    return "\n\n".join(_run(name, run) for name, run in runs.items())


def _run(name: str, run: dict[str, Any]) -> str:
    by_length: dict[int, list[Scores]] = {}
    for scores in run["scores"]:
        by_length.setdefault(scores["length"], []).append(scores)
    shown = {n for n, found in by_length.items() if sum(_is_whole(s) for s in found) > 1}
    answers = _answers(name)
    parts = [_length(run, longest, by_length[longest], answers)] if (longest := max(shown, default=0)) else []
    if len(shown) > 1:
        parts += ["", *_every_length({n: by_length[n] for n in sorted(shown)}, answers)]
    cut_off = [_cut_off(n, found) for n, found in by_length.items() if n not in shown]
    origin = " ".join([source(f"{name}.json", run, "jax"), *went_on(run, _name)])
    return "\n".join([*parts, *cut_off, "", origin])


def _length(run: dict[str, Any], length: int, found: list[Scores], answers: Answers) -> str:
    found = sorted(found, key=lambda s: -s["budget"])
    dense = next(s for s in found if s["method"] == "dense")
    common = [task for task in TASKS if all(task in s["tasks"] for s in found)]
    rows = [[task, *(f"{s['tasks'][task]:.0f}" if task in s["tasks"] else "" for s in found)] for task in TASKS]
    rows.append([f"**average of {len(TASKS)}**", *(f"{s['average']:.1f}" if _is_whole(s) else "" for s in found)])
    if len(common) < len(TASKS):
        means = (np.mean([s["tasks"][task] for task in common]) for s in found)
        rows.append([f"**average of the {len(common)} that all have**", *(f"{mean:.1f}" for mean in means)])
    model = MODELS.get(run["about"]["model"], "SmolLM2, ")
    lines = [
        f"{model}prompts of {length} tokens, at least {min(s['samples'] for s in found)} per task, scores in percent:",
        "",
        *table(["task", *map(_way, found)], rows),
        "",
        "Points above or below dense on the tasks that a method has answered, and HADS at the same budget on the same "
        "prompts; in brackets the 95% interval of the difference, paired by prompt:",
        "",
        *_differences(length, found, answers),
        "",
        *_undecided(length, found, answers),
    ]
    lines += _aims(length, answers)
    for s in (s for s in found if s["method"] == "hads"):
        lost, won = (
            [task for task in s["tasks"] if sign * (s["tasks"][task] - dense["tasks"][task]) > 0] for sign in (-1, 1)
        )
        lines.append(
            f"- {_way(s)}: lower than dense in {', '.join(lost) or 'no task'}; higher in {', '.join(won) or 'no task'}."
        )
    if hopeless := [task for task in dense["tasks"] if dense["tasks"][task] == 0]:
        lines.append(
            f"- Dense attention solves nothing of {' and '.join(hopeless)}, which "
            f"{'say' if len(hopeless) > 1 else 'says'} nothing of a method."
        )
    if partial := [s for s in found if not _is_whole(s)]:
        missing = [task for task in TASKS if any(task not in s["tasks"] for s in partial)]
        lines.append(
            f"- An empty cell was not run, the time was over: {', '.join(missing)}. So averages of different "
            "tasks are not shown."
        )
    return "\n".join(lines)


def _aims(length: int, answers: Answers) -> list[str]:
    """Whether HADS is as close to dense as it should be, with the oracle's value beside it."""
    dense, lines = answers(length, "dense", 1.0), []
    for budget, points in AIMS.items():
        lost = {
            method: -difference(mine, dense).mean
            for method in ("hads", "oracle_gain")
            if (mine := answers(length, method, budget))
        }
        if "hads" in lost:
            beside = f"; the oracle: {lost['oracle_gain']:.1f}" if "oracle_gain" in lost else ""
            reached = "Reached" if lost["hads"] <= points else "Missed"
            lines.append(
                f"- The aim of HADS {budget:.0%} is at most {points} points under dense. {reached}: "
                f"{lost['hads']:.1f}{beside}."
            )
    return lines


def _every_length(by_length: dict[int, list[Scores]], answers: Answers) -> list[str]:
    """Averages of all tasks, with the distance from dense on the same prompts."""
    ways = dict.fromkeys((s["method"], s["budget"]) for found in by_length.values() for s in found)
    rows, beside = [], list[Difference]()
    for method, budget in sorted(ways, key=lambda way: -way[1]):
        cells = []
        for length, found in by_length.items():
            s = next((s for s in found if (s["method"], s["budget"]) == (method, budget)), None)
            if s is None or not _is_whole(s):
                cells.append("")
            elif method == "dense":
                cells.append(f"{s['average']:.1f}")
            else:
                mine = answers(length, method, budget)
                cells.append(f"{s['average']:.1f}, {_written(difference(mine, answers(length, 'dense', 1.0)))}")
                if method != "oracle_gain" and (ours := _ours_there(length, s, answers)):
                    beside.append(difference(ours, mine))
        rows.append([_way({"method": method, "budget": budget}), *cells])
    won = [d for d in beside if d.mean > 0]
    sure = sum(d.low is not None and d.low > 0 for d in won)
    return [
        f"Averages of the {len(TASKS)} tasks at every length, and their distance from dense with its 95% interval, all "
        "with one profile:",
        "",
        *table(["read with", *(f"{n} tokens" for n in by_length)], rows),
        "",
        f"- HADS scores higher than a rival at the same length and budget in {len(won)} of {len(beside)} cases; in "
        f"{sure} of them the 95% interval of the difference is above 0.",
    ]


def _answers(name: str) -> Answers:
    """The scores of every prompt that was answered, in percent."""
    with lzma.open(record.RESULTS / f"{name}.jsonl.xz", "rt") as file:
        _, *lines = map(json.loads, file)

    def of(length: int, method: str, budget: float) -> dict[str, float]:
        way = (length, method, budget)
        mine = [line for line in lines if (line["length"], line["method"], line["budget"]) == way]
        return {line["sequence"]: 100 * line["score"] for line in mine if line["task"] in TASKS}

    return of


def _differences(length: int, found: list[Scores], answers: Answers) -> list[str]:
    dense = answers(length, "dense", 1.0)
    cells = []
    for s in (s for s in found if s["method"] != "dense"):
        mine = answers(length, s["method"], s["budget"])
        ours = _ours_there(length, s, answers)
        beside = [_written(difference(ours, other)) for other in (dense, mine)] if ours else ["", ""]
        cells.append([_way(s), str(len(s["tasks"])), _written(difference(mine, dense)), *beside])
    return table(["read with", "tasks", "minus dense", "HADS minus dense there", "HADS minus it"], cells)


def _undecided(length: int, found: list[Scores], answers: Answers) -> list[str]:
    """How many of the differences between HADS and other methods might be chance."""
    differences = [
        difference(ours, answers(length, s["method"], s["budget"]))
        for s in found
        if (ours := _ours_there(length, s, answers))
    ]
    if not differences:
        return []
    open_ = sum(d.low <= 0 <= d.high for d in differences if d.low is not None and d.high is not None)
    return [f"- HADS minus another method: {open_} of {len(differences)} intervals contain 0."]


def _ours_there(length: int, scores: Scores, answers: Answers) -> dict[str, float]:
    """HADS's scores, at this method's budget, of the prompts that the method has answered; none for HADS itself."""
    if scores["method"] in ("dense", "hads"):
        return {}
    mine = answers(length, scores["method"], scores["budget"])
    return {prompt: score for prompt, score in answers(length, "hads", scores["budget"]).items() if prompt in mine}


def _written(d: Difference) -> str:
    return f"{d.mean:+.1f} ({d.low:+.1f} to {d.high:+.1f})"


def _cut_off(length: int, found: list[Scores]) -> str:
    said = ", ".join(f"{_way(s)} {s['average']:.0f} on {len(s['tasks'])}" for s in found)
    return (
        f"- At {length} tokens the run was cut off within the {len(TASKS)} tasks: {said} of them. Too few for a table."
    )


def _is_whole(scores: Scores) -> bool:
    return len(scores["tasks"]) == len(TASKS)


def _way(scores: Scores) -> str:
    name = _name(scores["method"])
    return name if scores["method"] == "dense" else f"{name} {scores['budget']:.0%}"


def _name(method: str) -> str:
    return {"dense": "dense", "hads": "HADS", "oracle_gain": "oracle"}.get(method) or plain(method)
