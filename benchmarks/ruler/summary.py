"""From recorded answers to scores: per task, their average, and how far it is from dense."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.ruler.tasks import BEYOND, TASKS
from benchmarks.ruler.way import Way
from xsake.hads.study.bootstrap import Difference, mean_of_groups

_SHORT = {"niah_single_": "s", "niah_multikey_": "k", "niah_multivalue": "mv", "niah_multiquery": "mq", "qa_": "qa"}


@dataclasses.dataclass(frozen=True)
class Scores:
    """One way at one length, in percent. `average` is over tasks, as RULER's; `against` is its distance from dense
    over the samples that both have answered, with a 95% interval over samples of the same tasks."""

    length: int
    way: Way
    tasks: Mapping[str, float]
    samples: int  # of the task that has fewest
    average: float
    seconds: float  # per answer, in the median: the first answer also compiles
    against: Difference | None


def summarise(lines: Iterable[dict[str, Any]], among: Collection[str] = TASKS) -> list[Scores]:
    """Scores of these tasks by length and way, in the order of the records."""
    found: dict[tuple[int, Way], dict[str, dict[str, Any]]] = defaultdict(dict)
    for line in lines:
        if line["task"] in among:
            found[line["length"], Way(line["method"], line["budget"])][line["sequence"]] = line
    rows = []
    for (length, way), mine in sorted(found.items(), key=lambda item: item[0][0]):
        by_task: dict[str, list[float]] = defaultdict(list)
        for line in mine.values():
            by_task[line["task"]].append(100 * line["score"])
        tasks = {name: float(np.mean(by_task[name])) for name in among if name in by_task}
        rows.append(
            Scores(
                length,
                way,
                tasks,
                min(map(len, by_task.values())),
                float(np.mean(list(tasks.values()))),
                float(np.median([line["seconds"] for line in mine.values()])),
                _difference(mine, found.get((length, Way("dense", 1.0)), {})),
            )
        )
    return rows


def beyond(lines: Iterable[dict[str, Any]]) -> list[Scores]:
    """Scores of the tasks that RULER has not: how many answers are whole, and how many begin right."""
    counted = []
    for line in lines:
        if line["task"] in BEYOND:
            counts = {"whole": line["score"] == 1, "begun": line["begins"]}
            for what, right in counts.items():
                name = f"{line['task']} {what}"
                prompt = line["sequence"].split("/", 1)[1]
                counted.append(line | {"task": name, "sequence": f"{name}/{prompt}", "score": float(right)})
    return summarise(counted, list(dict.fromkeys(line["task"] for line in counted)))


def _difference(mine: dict[str, dict[str, Any]], dense: dict[str, dict[str, Any]]) -> Difference | None:
    if mine is dense or not set(mine) & set(dense):
        return None
    return difference(*({name: 100 * line["score"] for name, line in lines.items()} for lines in (mine, dense)))


def difference(one: Mapping[str, float], other: Mapping[str, float]) -> Difference:
    """The mean difference of scores by prompt, TASK/LENGTH/SAMPLE, over the prompts that both have.

    Every task counts alike, as in the average, also where a run was cut off and some tasks have more answers.
    """
    by_task: dict[str, list[float]] = defaultdict(list)
    for prompt in sorted(set(one) & set(other)):
        by_task[prompt.split("/")[0]].append(one[prompt] - other[prompt])
    return mean_of_groups([np.array(found) for found in by_task.values()])


def as_json(rows: Iterable[Scores]) -> list[dict[str, Any]]:
    return [
        {"length": row.length, "method": row.way.method, "budget": row.way.budget, "samples": row.samples}
        | {"average": row.average, "tasks": dict(row.tasks), "seconds": row.seconds}
        | {"against_dense": None if row.against is None else row.against._asdict()}
        for row in rows
    ]


def tables(rows: list[Scores], what: str = "RULER's scores") -> list[Table]:
    """A table per length: ways by tasks."""
    made = []
    for length in dict.fromkeys(row.length for row in rows):
        mine = [row for row in rows if row.length == length]
        names = list(dict.fromkeys(name for row in mine for name in row.tasks))
        title = f"{length} tokens: {what} in percent, from {min(row.samples for row in mine)} samples per task"
        table = Table("", *map(_short, names), "average", "minus dense", "s", title=title)
        for row in mine:
            cells = [f"{row.tasks[name]:.0f}" if name in row.tasks else "" for name in names]
            d = row.against
            distance = "" if d is None else rf"{d.mean:+.1f} \[{d.low:+.1f}, {d.high:+.1f}]"
            table.add_row(str(row.way), *cells, f"{row.average:.1f}", distance, f"{row.seconds:.1f}")
        made.append(table)
    return made


def _short(name: str) -> str:
    for long, short in _SHORT.items():
        name = name.replace(long, short)
    return name
