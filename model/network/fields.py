"""What a field may hold: each field is declared once, by kind and range, and checked in one place.

Files come from anywhere, so nothing is assumed of a value: it may be of any type, huge, or not a number.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

LARGEST_INT = 2**31 - 1  # JAX counts tokens and indexes arrays in int32
LARGEST_FLOAT = 3.4028234e38  # of float32
_MOST_BYTES = 1 << 24  # the most that `read_json` and `read_text` read; real files have some thousand


@runtime_checkable
class Kind(Protocol):
    """Says whether a value is allowed; `str(kind)` describes the allowed values."""

    def allows(self, value: Any) -> bool: ...


@dataclasses.dataclass(frozen=True)
class Whole:
    """An int; True and 2.0 do not count as ints."""

    least: int = 1
    most: int = LARGEST_INT

    def allows(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"an int of at least {self.least} and at most {self.most}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Number:
    """A finite int or float, within the bounds that are given."""

    above: int | float | None = None
    least: int | float | None = None
    below: int | float | None = None
    most: int | float | None = None

    def allows(self, value: Any) -> bool:
        # Compared without conversion: an int may be too large for a float.
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and -LARGEST_FLOAT <= value <= LARGEST_FLOAT
            and (self.above is None or value > self.above)
            and (self.least is None or value >= self.least)
            and (self.below is None or value < self.below)
            and (self.most is None or value <= self.most)
        )

    def __str__(self) -> str:
        bounds = {"above": self.above, "at least": self.least, "below": self.below, "at most": self.most}
        words = " and ".join(f"{word} {x}" for word, x in bounds.items() if x is not None)
        return f"a finite number, {words}" if words else "a finite number"


@dataclasses.dataclass(frozen=True)
class Flag:
    def allows(self, value: Any) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "True or False"


@dataclasses.dataclass(frozen=True)
class Text:
    def allows(self, value: Any) -> bool:
        return isinstance(value, str)

    def __str__(self) -> str:
        return "text"


@dataclasses.dataclass(frozen=True)
class OneOf:
    choices: tuple[str, ...]

    def allows(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.choices

    def __str__(self) -> str:
        return f"one of {', '.join(self.choices)}"


@dataclasses.dataclass(frozen=True)
class Maybe:
    """None, or a value of another kind."""

    kind: Kind

    def allows(self, value: Any) -> bool:
        return value is None or self.kind.allows(value)

    def __str__(self) -> str:
        return f"None, or {self.kind}"


@dataclasses.dataclass(frozen=True)
class ListOf:
    item: Kind

    def allows(self, value: Any) -> bool:
        return isinstance(value, list) and all(map(self.item.allows, value))

    def __str__(self) -> str:
        return f"a list, and each item {self.item}"


@dataclasses.dataclass(frozen=True)
class Table:
    """A dictionary, as JSON has it: the keys are text."""

    def allows(self, value: Any) -> bool:
        return isinstance(value, dict)

    def __str__(self) -> str:
        return "a table of names and values"


def check(name: str, value: Any, kind: Kind, where: Path | None = None) -> None:
    if not kind.allows(value):
        raise ValueError(f"{'' if where is None else f'{where}: '}{name}={reprlib.repr(value)} must be {kind}")


def check_all(values: Any, kinds: Mapping[str, Kind]) -> None:
    """Check each named attribute of an object against its kind."""
    for name, kind in kinds.items():
        check(name, getattr(values, name), kind)


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, of a size that a person may have written; ValueError for anything else."""
    try:
        return _read_some(path).decode()
    except ValueError as error:
        raise ValueError(f"{path} is not text: {error}") from error


def _read_some(path: Path) -> bytes:
    with open(path, "rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """The table in a JSON file; ValueError for anything else."""
    try:
        found = json.loads(_read_some(path))
    except RecursionError as error:
        raise ValueError(f"{path} is not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, not {reprlib.repr(found)}")
    return found
