"""Results written as they come, one JSON line each, so that a run that was cut off goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from xsake._ground import atomic

KEY = ("sequence", "method", "budget", "layers")


class Records:
    """A file of lines, one per sequence, method and budget. A last line that was cut off is dropped.

    The first line says what the run was of (model, length, block, ...): a file of another run is refused.
    """

    def __init__(self, path: str | os.PathLike, about: dict[str, Any]):
        self.path, self.about = Path(path), about
        self._lines: dict[tuple, dict[str, Any]] = {}
        if self.path.exists():
            head, *lines = _whole_lines(self.path)
            if head.get("about") != about:
                raise ValueError(f"{self.path} holds a run of {head.get('about')}, not of {about}: give another --out")
            self._lines = {_key(line): line for line in lines}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = [{"about": about}, *self]  # without a line that was cut off
        atomic.write_text(self.path, "".join(json.dumps(line) + "\n" for line in whole))

    def __contains__(self, key: tuple) -> bool:
        return key in self._lines

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._lines.values())

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, lines: Iterable[dict[str, Any]]) -> None:
        added = {_key(line): line for line in lines}
        with atomic.naming(self.path), self.path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in added.values())
        self._lines |= added


def read(path: str | os.PathLike) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The `about` of a file of records, and its lines."""
    head, *lines = _whole_lines(Path(path))
    return head["about"], lines


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().split("\n")
    parsed = []
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            parsed.append(json.loads(line))
        except ValueError as error:
            if number == len(lines) - 1:
                break
            raise ValueError(f"{path}, line {number + 1} is damaged: {error}") from error
    if not parsed or "about" not in parsed[0]:
        raise ValueError(f"{path} is not a file of records: its first line does not say what it is about")
    return parsed


def key_of(sequence: str, method: str, budget: float, layers: str, last_rows: str = "own") -> tuple:
    """A line's key: the values of KEY, and `last_rows` unless each method weighs the last rows in its own way."""
    return sequence, method, budget, layers, *([] if last_rows == "own" else [last_rows])


def _key(line: dict[str, Any]) -> tuple:
    sequence, method, budget, layers = (line[name] for name in KEY)
    return key_of(sequence, method, budget, layers, line.get("last_rows", "own"))
