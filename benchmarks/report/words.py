"""How tables, times and sources are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def milliseconds(seconds: dict[str, float]) -> str:
    """Median, and the quartiles in brackets."""
    return f"{seconds['median'] * 1e3:.0f} ms ({seconds['low'] * 1e3:.0f}-{seconds['high'] * 1e3:.0f})"


def source(name: str, run: dict[str, Any], *versions: str, note: str = "") -> str:
    """Where the numbers come from: the file, the hardware, the versions and the commit."""
    e = run["environment"]
    facts = [e["device"], note, *(f"{v} {e['versions'][v]}" for v in versions), f"commit {e['commit'][:7]}"]
    return f"Recorded in `benchmarks/results/{name}`: {', '.join(fact for fact in facts if fact)}."


def went_on(run: dict[str, Any], named: Callable[[str], str]) -> list[str]:
    """Sentences that say which methods' records an earlier run made, if the run went on from its records."""
    return [
        f"Of an earlier run, commit {one['environment']['commit'][:7]}: {', '.join(map(named, one['methods']))}"
        f"{''.join(f'; {one[what]}' for what in ('lengths', 'tasks', 'samples') if what in one)}."
        for one in run.get("earlier", ())
    ]
