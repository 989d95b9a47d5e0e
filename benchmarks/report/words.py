"""Recorded runs, and the one shape of what is made of them: sentences, a table, facts, and where it is recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks import record

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """A record below benchmarks/results/."""

    name: str
    content: dict[str, Any]

    @classmethod
    def load(cls, name: str) -> Run:
        return cls(name, record.load(name))

    @classmethod
    def load_all(cls, prefix: str) -> list[Run]:
        """The runs whose names begin like this."""
        folder = prefix.rpartition("/")[0]
        names = sorted(path.stem for path in record.RESULTS.glob(f"{prefix}*.json"))
        return [cls.load(f"{folder}/{name}" if folder else name) for name in names]

    @property
    def results(self) -> Any:
        return self.content["results"]

    @property
    def settings(self) -> Row:
        return self.content["environment"]["settings"]

    def by(self, *names: str) -> dict[tuple, Row]:
        """The results by the values of these fields."""
        return {tuple(row.get(name) for name in names): row for row in self.results}

    def source(self, *versions: str, note: str = "", name: str | None = None) -> str:
        """The file (or the `name` of several), the hardware and the versions."""
        e = self.content["environment"]
        found = (f"{name} {e['versions'][name]}" for name in versions if name in e["versions"])
        facts = ", ".join(fact for fact in (e["device"], note, *found) if fact)
        rows = self.content.get("results")
        older = "earlier" in self.content or any(
            "commit" in row or "environment" in row for row in (rows if isinstance(rows, list) else ())
        )
        return f"Recorded in `benchmarks/results/{name or self.name}.json`: {facts}." + (
            " Some rows are of an earlier run; the record names it." if older else ""
        )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


def listing[T](rows: Iterable[T], columns: Mapping[str, str | Callable[[T], str]]) -> str:
    """A table with a line per row. A column is a format of the row's fields, or a function of the row."""

    def cell(row: Any, column: str | Callable[[T], str]) -> str:
        return column.format(**row) if isinstance(column, str) else column(row)

    return table(list(columns), ([cell(row, column) for column in columns.values()] for row in rows))


def grid[R: Hashable, C: Hashable](
    corner: str | Sequence[str],
    rows: Mapping[R, str | Sequence[str]],
    columns: Mapping[C, str],
    cell: Callable[[R, C], str],
) -> str:
    """A table of `cell(row, column)`, by the words for its rows and columns. A row may have several words; the first is
    left out where it is that of the row above."""
    heads = [corner] if isinstance(corner, str) else corner
    lines, above = [], None
    for key, words in rows.items():
        first, *more = [words] if isinstance(words, str) else words
        lines.append([first if first != above or not more else "", *more, *(cell(key, column) for column in columns)])
        above = first
    return table([*heads, *columns.values()], lines)


def facts(*sentences: str | None) -> str:
    """A list of those that there are."""
    return "\n".join(f"- {sentence}" for sentence in sentences if sentence)


def section(*parts: str | None) -> str:
    return "\n\n".join(part for part in parts if part)


def ms(seconds: float | Mapping[str, float], digits: int = 2) -> str:
    """Milliseconds, of a number or of a median with quartiles."""
    if isinstance(seconds, int | float):
        return f"{seconds * 1e3:.{digits}f} ms"
    low, median, high = (f"{seconds[name] * 1e3:.{digits}f}" for name in ("low", "median", "high"))
    return f"{median} ms ({low}-{high})"


def median(row: Row, what: str) -> float:
    return row["seconds"][what]["median"]


def times(ratio: float, digits: int = 2) -> str:
    return f"{ratio:.{digits}f}x"


def span(values: Iterable[float], form: str = "{:.2f}") -> str:
    """The least and the most of some numbers."""
    found = sorted(values)
    low, high = (form.format(found[at]) for at in (0, -1))
    return low if low == high else f"{low} to {high}"


def unique[T](values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))
