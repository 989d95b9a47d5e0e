"""HadsProfile files: JSON that a person can read, a line for each head, versioned, written atomically."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import numpy as np

from xsake._ground import atomic, read
from xsake._ground.fields import Kind, check, from_stored
from xsake._ground.kinds import TABLE, TEXT, list_of, whole
from xsake.hads.profile.estimator import BUCKETS, KINDS
from xsake.hads.profile.rule import VERSION_3, Rule

FORMAT = "xsake.HadsProfile"
WITHOUT_RULE, WITHOUT_WINDOW, WITHOUT_EXACT_ROWS, VERSION = 3, 4, 5, 6
_MOST_BYTES = 1 << 26  # some 3.5 kB for each head
_HEADS = Kind(lambda value: list_of(TABLE).allows(value) and len(value) > 0, "a list of at least one table")


class _Names:
    """The names of a profile's fields, from its class: arrays with an entry per head, other arrays, static fields."""

    def __init__(self, profile: Any):
        axes = {field.name: field.metadata.get("axes") for field in dataclasses.fields(profile)}
        self.per_head = [name for name, of in axes.items() if of and of[:2] == ("layers", "heads")]
        self.tables = [name for name, of in axes.items() if of and name not in self.per_head]
        self.static = [name for name, of in axes.items() if not of]


def save(profile: Any, path: str | os.PathLike) -> None:
    profile.check()
    names = _Names(profile)
    head: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    head |= {name: getattr(profile, name) for name in names.static} | {"rule": dataclasses.asdict(profile.rule)}
    head |= {"feature_kinds": KINDS, "distance_buckets": BUCKETS.tolist()}
    tables = {name: _numbers(getattr(profile, name)) for name in names.tables}
    lines = [
        json.dumps(
            {"layer": layer, "head": h} | {name: _numbers(getattr(profile, name)[layer, h]) for name in names.per_head}
        )
        for layer in range(profile.layers)
        for h in range(profile.q_heads)
    ]
    # One name per line, and in `heads` one head per line.
    rows = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in (head | tables).items()]
    rows.append(' "heads": [\n  ' + ",\n  ".join(lines) + "\n ]")
    text = "{\n" + ",\n".join(rows) + "\n}\n"
    atomic.write_text(path, text)


def load[Profile](kind: type[Profile], path: str | os.PathLike) -> Profile:
    """Read a profile of class `kind`, of this version or an earlier one (`_of_earlier`)."""
    damaged = f"{os.fspath(path)} is not a HADS profile, or is damaged"
    data = read.parse_json(f"{damaged}: it", read.read_bytes(path, _MOST_BYTES))
    version = read.check_version(
        os.fspath(path), data, FORMAT, tuple(range(WITHOUT_RULE, VERSION + 1)), ": calibrate again"
    )
    try:
        profile: Any = kind(**_fields(_Names(kind), data, version))
        profile.check()
    except ValueError as error:
        raise ValueError(f"{damaged}: {read.reason(error)}") from error
    return profile


def _fields(names: _Names, data: dict[str, Any], version: int) -> dict[str, Any]:
    data = {"windowed": []} | data | _of_earlier(data, version)
    if missing := [
        n for n in ("feature_kinds", "distance_buckets", "heads", *names.tables, *names.static) if n not in data
    ]:
        raise ValueError(f"it has no {missing[0]}")
    if (data["feature_kinds"], data["distance_buckets"]) != (list(KINDS), BUCKETS.tolist()):
        raise ValueError("its features or distance buckets are not those of this version")
    lines = data["heads"]
    check("heads", lines, _HEADS)
    places = [(line.get("layer"), line.get("head")) for line in lines]
    layers, heads = (places[-1][axis] + 1 if type(places[-1][axis]) is int else 0 for axis in (0, 1))
    # The count first: a damaged number must not make a list of a billion places.
    if len(places) != layers * heads or places != [(layer, h) for layer in range(layers) for h in range(heads)]:
        raise ValueError("its heads are not complete and in order")
    arrays = {name: _floats(name, data[name]) for name in names.tables}
    for name in names.per_head:
        flat = _floats(name, [line.get(name) for line in lines])
        arrays[name] = flat.reshape(layers, heads, *flat.shape[1:])
    static = {name: data[name] for name in names.static}
    check("digests", static["digests"], list_of(TEXT))
    check("windowed", static["windowed"], list_of(whole(0)))
    rule = from_stored(Rule, read.check_table("rule", static["rule"]))
    tuples = {name: tuple(static[name]) for name in ("digests", "windowed")}
    return arrays | static | tuples | {"rule": rule}


def _of_earlier(data: dict[str, Any], version: int) -> dict[str, Any]:
    """The fields that files of an earlier version lack, with the one value that all their profiles were made with."""
    found: dict[str, Any] = {}
    if version == WITHOUT_RULE:
        found["rule"] = dataclasses.asdict(VERSION_3)
    elif version <= WITHOUT_EXACT_ROWS and isinstance(data.get("rule"), dict):
        found["rule"] = {"exact_queries": 0} | data["rule"]
    if version <= WITHOUT_EXACT_ROWS and "block" in data:
        found["block_q"] = data["block"]
    if version <= WITHOUT_WINDOW:
        found["window"] = None
    return found


def _floats(name: str, values: Any) -> np.ndarray:
    """float32 from lists of numbers in JSON; numbers in quotes, beyond int64 and missing ones are none."""
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} must have a shape: {read.reason(error)}") from error
    if array.dtype.kind not in "if":
        raise ValueError(f"{name} must hold numbers in every place")
    with np.errstate(over="ignore"):  # infinite ones are refused with the profile
        return array.astype(np.float32)


def _numbers(value: Any) -> Any:
    """Floats in the shortest form that reads back as the same float32."""
    array = np.asarray(value, np.float32)
    return float(str(array[()])) if array.ndim == 0 else [_numbers(x) for x in array]
