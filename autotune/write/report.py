"""Tables of the heuristic's times beside the tuned times, and the rejected configurations: printed, and as a page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Column, Table

from xsake._measure.environment import Facts
from xsake._measure.timing import Timing
from xsake.autotune.problem import Part
from xsake.autotune.result import Result

COLUMNS = ("workload", "block", "direction", "density", "heuristic", "tuned", "speed-up", "what changed", "trials")
DENSER = 0.05  # masks are said to be denser than asked for if they are by more than this
FASTER, SAME = 1.05, 1.03  # a speed-up of at least FASTER is a gain, a speed-up of at most SAME is none


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """One row per workload, direction and density."""
    return [
        (
            m.workload,
            f"{r.plan.key.block_q} x {r.plan.key.block_kv}",
            r.plan.key.direction,
            f"{m.density:.1%}",
            _time(m.default),
            _time(m.tuned),
            f"{m.gain.median:.2f}x ({m.gain.low:.2f}-{m.gain.high:.2f})",
            _changes(r.plan.default, r.config),
            f"{len(r.tried)} of {len(r.plan.parts)}",
        )
        for r in results
        if r.config is not None
        for m in r.measured
    ]


def rejected(results: Sequence[Result]) -> list[str]:
    """Configurations that are wrong or do not run, and studies without an entry; equal lines are counted."""
    lines: dict[str, int] = {}
    for r in results:
        if r.config is None:
            lines[f"{r.plan.key}: nothing written, {r.failure}"] = 1
        for t in r.tried:
            if t.state in ("failed", "wrong"):
                who = f"{r.plan.key.implementation} {r.plan.key.direction}, {_fields(t.part)}"
                line = f"{who}: {t.state}, {(t.reason or '').partition(chr(10))[0][:200]}"
                lines[line] = lines.get(line, 0) + 1
    return [line if n == 1 else f"{line} ({n} times)" for line, n in lines.items()]


def summary(results: Sequence[Result]) -> str:
    gains = [m.gain.median for r in results for m in r.measured]
    if not gains:
        return "No race was decided."
    return (
        f"{len(gains)} workload-density pairs: {sum(g >= FASTER for g in gains)} are at least 5% faster than the "
        f"heuristic, for {sum(g <= SAME for g in gains)} the heuristic is within 3% of the best found; the speed-ups "
        f"are {min(gains):.2f}x to {max(gains):.2f}x.{_denser(results)}{_in_vain(gains)}"
    )


def _in_vain(gains: Sequence[float]) -> str:
    """Where tuning gains nothing to speak of, what the time was good for; or nothing."""
    return " Tuning gains less than 3% here: the time was for the check." if max(gains) <= SAME else ""


def _denser(results: Sequence[Result]) -> str:
    """A sentence on masks that are denser than they were asked to be, or nothing."""
    pairs = {(m.asked, m.density) for r in results for m in r.measured if m.asked and m.density > m.asked + DENSER}
    told = ", ".join(f"{density:.1%} where {asked:.1%} were asked for" for asked, density in sorted(pairs))
    return f" Short sequences have denser masks, since the diagonal is always kept: {told}." if told else ""


def show(results: Sequence[Result], console: Console) -> None:
    """Print a table per workload and block that fits in 80 columns."""
    tables: dict[str, Table] = {}
    for workload, block, *cells in rows(results):
        title = f"{workload}, blocks {block}: milliseconds per call"
        if title not in tables:
            look = dict(box=box.SIMPLE, pad_edge=False, collapse_padding=True, title_justify="left")
            columns = (Column(name, overflow="fold") for name in COLUMNS[2:])
            tables[title] = Table(*columns, title=title, **look)  # type: ignore[arg-type]
        tables[title].add_row(*map(_narrow, cells))
    for table in tables.values():
        console.print(table)
    console.print(summary(results))
    if lines := rejected(results):
        console.print("Rejected:")
        for line in lines:
            console.print(f"- {line}", markup=False)


def write(results: Sequence[Result], facts: Facts, folder: Path) -> Path:
    """Write report.md, and its plots beside it. Returns the path of report.md."""
    from xsake.autotune.write import plots

    folder.mkdir(parents=True, exist_ok=True)
    pictures = plots.draw(results, folder)
    versions = ", ".join(f"{name} {v}" for name, v in facts.environment["versions"].items())
    parts = [
        f"# Tuning on {facts.device_kind}\n\n{versions}\n\n{summary(results)}",
        "\n".join(_markdown_row(row) for row in (COLUMNS, ("---",) * len(COLUMNS), *rows(results))),
        "## Rejected\n\n" + ("\n".join(f"- {line}" for line in rejected(results)) or "Nothing."),
        "## Every trial\n\n" + "\n\n".join(f"![{path.stem}]({path.name})" for path in pictures),
    ]
    path = folder / "report.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def _narrow(cell: str) -> str:
    """A time without its quartiles, or a speed-up with its interval below it."""
    return re.sub(r"x \((.*)\)$", r"x\n\1", cell.partition(" ms")[0])


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _time(t: Timing) -> str:
    return f"{t.median * 1e3:.3f} ms ({t.low * 1e3:.3f}-{t.high * 1e3:.3f})"


def _changes(default: Part, tuned: Part | None) -> str:
    changed = {name: value for name, value in (tuned or {}).items() if default[name] != value}
    return _fields(changed) or "nothing"


def _fields(part: Part) -> str:
    return ", ".join(f"{name}={value}" for name, value in part.items())
