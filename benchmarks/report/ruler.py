"""RULER's tasks, made from recorded runs of `python -m benchmarks.ruler`."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable

from benchmarks import record
from benchmarks.report.words import Row, Run, facts, grid, section, unique
from benchmarks.ruler.summary import difference
from benchmarks.ruler.tasks import TASKS
from xsake._ground import words
from xsake._ground.words import in_words
from xsake.hads.study.bootstrap import Difference

Way = tuple[str, float]  # method and budget
Answers = Callable[[int, Way], dict[str, float]]  # scores by prompt, in percent
DENSE: Way = ("dense", 1.0)
LAST_ROWS = "hads/last-rows-qwen2.5-coder-1.5b"
OURS = ("dense", "hads", "hads_before", "oracle_gain")


def _run() -> tuple[Run, dict[tuple[int, Way], Row], list[Way]]:
    (run,) = Run.load_all("ruler_")
    found = {(s["length"], (s["method"], s["budget"])): s for s in run.content["scores"]}
    return run, found, sorted(unique(way for _, way in found), key=lambda way: -way[1])


def by_length() -> str:
    """Averages of all tasks, with the distance from dense on the same prompts."""
    run, found, ways = _run()
    answers = answers_of(run)
    lengths = {n: f"{n} tokens" for n in unique(n for n, _ in found)}

    def cell(way: Way, length: int) -> str:
        if (length, way) not in found:
            return ""
        row, dense = found[length, way], found[length, DENSE]
        average = f"{row['average']:.1f}"
        if way == DENSE:
            return average
        distance = _written(difference(answers(length, way), answers(length, DENSE)))
        return f"{average}, {distance}" if row["samples"] == dense["samples"] else distance

    beside = [
        difference(answers(length, ("hads", way[1])), answers(length, way))
        for length, way in found
        if way[0] not in OURS and (length, ("hads", way[1])) in found
    ]
    won = [d for d in beside if d.mean > 0]
    return section(
        grid("read with", {way: _way(way) for way in ways}, lengths, cell),
        facts(
            "Prompts per task: "
            + "; ".join(f"{words}, {_prompts(found, n)}" for n, words in lengths.items())
            + ". Distances are on the prompts that both have read; an average of fewer prompts is left out.",
            f"HADS scores higher than a rival at the same length and budget in {len(won)} of {len(beside)} cases; in "
            f"{sum((d.low or 0) > 0 for d in won)} of them the 95% interval of the difference is above 0.",
        ),
        run.source("jax"),
    )


def _prompts(found: dict[tuple[int, Way], Row], length: int) -> str:
    by: dict[int, list[str]] = {}
    for (n, (method, _)), row in found.items():
        if n == length:
            by.setdefault(row["samples"], []).append("dense" if method == "dense" else in_words(method))
    said = (f"{count} ({', '.join(unique(names))})" for count, names in sorted(by.items(), reverse=True))
    return " and ".join(said).replace(" + forced blocks", "")


def by_task() -> str:
    """Scores of every task at the longest length."""
    _, found, ways = _run()
    longest = max(n for n, _ in found)
    samples = min(found[longest, way]["samples"] for way in ways)
    hopeless = [words.TASKS[task] for task in TASKS if not found[longest, DENSE]["tasks"][task]]
    return section(
        grid(
            "task",
            {task: words.TASKS[task] for task in TASKS},
            {way: _way(way) for way in ways},
            lambda task, way: f"{found[longest, way]['tasks'][task]:.0f}",
        ),
        facts(
            f"{longest} tokens, at least {samples} prompts per task.",
            f"Dense attention solves nothing of: {', '.join(hopeless)}." if hopeless else None,
        ),
    )


def steps() -> str:
    """What each part of choosing the last rows is worth, on the same prompts."""
    run = Run.load(LAST_ROWS)
    return section(_lost(run, "step", ("step",), "HADS"), _prompts_of(run, "step"), run.source("jax"))


def weights() -> str:
    """How much an error in the last rows should count, in several shapes of blocks."""
    run = Run.load(LAST_ROWS)
    return section(_lost(run, "weight", ("blocks", "weight"), ("blocks", "weight")), _prompts_of(run, "weight"))


def _lost(run: Run, kind: str, names: tuple[str, ...], corner: str | tuple[str, ...]) -> str:
    """The distance from dense of rows of one kind, by length and budget."""
    by = {(*(r[name] for name in names), r["length"], r["budget"]): r for r in run.results if r["kind"] == kind}
    rows = {key: tuple(map(str, key)) for key in sorted({key[:-2] for key in by}) if kind == "weight"}
    rows = rows or {key: key for key in unique(key[:-2] for key in by)}
    columns = {key: f"{key[0]} tokens, {key[1]:.0%}" for key in sorted({key[-2:] for key in by})}

    def cell(row: tuple, column: tuple) -> str:
        found = by.get((*row, *column))
        return "" if found is None else _written(Difference(**found["against_dense"]))

    return grid(corner, rows, columns, cell)


def _prompts_of(run: Run, kind: str) -> str:
    row = next(r for r in run.results if r["kind"] == kind)
    return facts(f"Points from dense attention, {row['samples']} prompts of each of {row['tasks']} tasks.")


def answers_of(run: Run) -> Answers:
    """The scores of every prompt that was answered."""
    with lzma.open(record.RESULTS / f"{run.name}.jsonl.xz", "rt") as file:
        _, *lines = map(json.loads, file)

    def of(length: int, way: Way) -> dict[str, float]:
        mine = (line for line in lines if (line["length"], line["method"], line["budget"]) == (length, *way))
        return {line["sequence"]: 100 * line["score"] for line in mine if line["task"] in TASKS}

    return of


def points_lost(budget: float, method: str = "hads") -> float:
    """Below dense attention at the longest length, on the same prompts."""
    run, found, _ = _run()
    answers, longest = answers_of(run), max(n for n, _ in found)
    return -difference(answers(longest, (method, budget)), answers(longest, DENSE)).mean


def _written(d: Difference) -> str:
    return f"{d.mean:+.1f} ({d.low:+.1f} to {d.high:+.1f})"


def _way(way: Way) -> str:
    method, budget = way
    return "dense" if way == DENSE else f"{in_words(method)}, {budget:.0%}".replace(" + forced blocks", "")
