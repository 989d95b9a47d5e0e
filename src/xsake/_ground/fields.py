"""Fields of a configuration: the values that each may have, declared once and checked in every new configuration."""

from __future__ import annotations

import dataclasses
import reprlib
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from xsake._ground import kinds
from xsake._ground.kinds import Kind

_KIND, _BEFORE = "kind", "before"


def field(kind: Kind, **rest: Any) -> Any:
    """A field of a dataclass for values of this kind; `rest` is explained in `whole`."""
    before = {_BEFORE: rest.pop(_BEFORE)} if _BEFORE in rest else {}
    return dataclasses.field(metadata={_KIND: kind, **before}, **rest)


def whole(low: int, high: int, *, multiple_of: int = 1, **rest: Any) -> Any:
    """A field for an int from `low` to `high`.

    `rest`, here and below: `default`, as of any dataclass field; `before`, the value that a stored configuration stands
    for if it was written before the field existed. Without `before`, a stored configuration must have the field.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Tiling:
    ...     rows: int = whole(1, 256)
    ...     order: str = one_of("rows", "columns", default="columns", before="rows")
    ...     def __post_init__(self) -> None:
    ...         check_fields(self)
    >>> from_stored(Tiling, {"rows": 64})
    Tiling(rows=64, order='rows')
    >>> Tiling(rows=512)
    Traceback (most recent call last):
    ValueError: rows=512 must be an int of at least 1 and at most 256
    """
    return field(kinds.whole(low, high, multiple_of), **rest)


def one_of(*choices: Any, **rest: Any) -> Any:
    """A field for one of a few values."""
    return field(kinds.one_of(*choices), **rest)


def flag(**rest: Any) -> Any:
    """A field for True or False."""
    return field(kinds.FLAG, **rest)


def check(name: str, value: Any, kind: Kind, where: Path | None = None) -> None:
    if not kind.allows(value):
        raise ValueError(f"{'' if where is None else f'{where}: '}{name}={reprlib.repr(value)} must be {kind}")


@cache
def kinds_of(config: type) -> Mapping[str, Kind]:
    """The kind of every field of a configuration."""
    return {f.name: f.metadata.get(_KIND) or _instance_of(config, f.name) for f in dataclasses.fields(config)}


def check_fields(config: Any) -> None:
    """Raise ValueError for the first field whose value is not allowed; to be called in `__post_init__`.

    A field that holds another configuration, such as a direction's, is declared by its type alone.
    """
    for name, kind in kinds_of(config.__class__).items():
        check(name, getattr(config, name), kind)


@cache
def hints(config: type) -> Mapping[str, Any]:
    """The types of a configuration's fields; asked in every call outside jit."""
    return typing.get_type_hints(config)


def _instance_of(config: type, name: str) -> Kind:
    kind: Any = hints(config)[name]
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise TypeError(f"{config.__name__}.{name} must declare its values: use whole, one_of or flag")
    return Kind(lambda value: isinstance(value, kind), f"a {kind.__name__}")


def from_stored(kind: type, values: Mapping[str, Any]) -> Any:
    """A configuration from stored values. Defaults are not used: they may have changed since."""
    fields = dataclasses.fields(kind)
    given = {f.name: f.metadata[_BEFORE] for f in fields if _BEFORE in f.metadata} | dict(values)
    if given.keys() != {f.name for f in fields}:
        raise ValueError(f"{kind.__name__} has the fields {[f.name for f in fields]}, the entry has {sorted(values)}")
    return kind(**given)
