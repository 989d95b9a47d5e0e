"""HadsProfile files: JSON that a person can read, a line for each head, versioned, written atomically."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from xsake._ground import atomic
from xsake.hads.profile import fingerprint
from xsake.hads.profile.estimator import BUCKETS, KINDS
from xsake.hads.profile.rule import VERSION_3, Rule

FORMAT, VERSION, WITH_WINDOW = "xsake.HadsProfile", 4, 5


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
    # Only a window needs the later version: without it, every xsake since version 4 can read the file.
    head: dict[str, Any] = {"format": FORMAT, "version": VERSION if profile.window is None else WITH_WINDOW}
    head |= {name: getattr(profile, name) for name in names.static} | {"rule": dataclasses.asdict(profile.rule)}
    if profile.window is None:
        del head["window"]
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
    """Read a profile of class `kind`. Files of version 3 hold no rule: all of them were made with VERSION_3."""
    damaged = f"{os.fspath(path)} is not a HADS profile, or is damaged"
    try:
        data = json.loads(Path(path).read_text())
        version = data["format"], data["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{damaged}: {error!r}") from error
    if version not in ((FORMAT, 3), (FORMAT, VERSION), (FORMAT, WITH_WINDOW)):
        raise ValueError(
            f"{os.fspath(path)} has format {version[0]!r} version {version[1]!r}; this xsake reads {FORMAT!r} versions "
            f"3 to {WITH_WINDOW}: calibrate again"
        )
    try:
        profile: Any = kind(**_fields(_Names(kind), data, VERSION_3 if version[1] == 3 else Rule(**data["rule"])))
        profile.check()
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, AttributeError) as error:
        raise ValueError(f"{damaged}: {error}") from error
    return profile


def _fields(names: _Names, data: dict[str, Any], rule: Rule) -> dict[str, Any]:
    if (tuple(data["feature_kinds"]), data["distance_buckets"]) != (KINDS, BUCKETS.tolist()):
        raise ValueError("its features or distance buckets are not those of this version")
    places = [(line["layer"], line["head"]) for line in data["heads"]]
    layers, heads = (places[-1][axis] + 1 for axis in (0, 1))
    # The count first: a damaged number must not make a list of a billion places.
    if len(places) != layers * heads or places != [(layer, h) for layer in range(layers) for h in range(heads)]:
        raise ValueError("its heads are not complete and in order")
    arrays: dict[str, Any] = {name: np.asarray(data[name], np.float32) for name in names.tables}
    for name in names.per_head:
        flat = np.asarray([line[name] for line in data["heads"]], np.float32)
        arrays[name] = flat.reshape(layers, heads, *flat.shape[1:])
    static: dict[str, Any] = {name: data[name] for name in names.static if name not in ("rule", "window")}
    static["window"] = data["window"] if data["version"] == WITH_WINDOW else None
    for name in ("block", "length", "kv_heads", *(["window"] if data["version"] == WITH_WINDOW else [])):
        if type(static[name]) is not int or static[name] < 1:
            raise ValueError(f"{name}={static[name]!r} must be an int of at least 1")
    texts = [static["model"], *static["digests"]] if isinstance(static["digests"], list) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("model must be a string, and digests a list of strings")
    fingerprint.check(static["digests"])
    return arrays | static | {"digests": tuple(static["digests"]), "rule": rule}


def _numbers(value: Any) -> Any:
    """Floats in the shortest form that reads back as the same float32."""
    array = np.asarray(value, np.float32)
    return float(str(array[()])) if array.ndim == 0 else [_numbers(x) for x in array]
