"""One file of tuned configurations: its format, and the look-up of the exact and the nearest entry."""

from __future__ import annotations

import dataclasses
import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from xsake.tuning_db.key import HADS, Key, places_near

# The newest that is read. Entries of version 1 do not say how sure their gain is; those of version 3 may be of HADS.
SCHEMA_VERSION = 3
SOURCES = ("measured", "schedule", "record")

_KEY_TYPES: dict[str, tuple[type, ...]] = {
    "operation": (str,),
    "implementation": (str,),
    "direction": (str,),
    "dtype": (str,),
    "causal": (bool,),
    "density": (int, float, type(None)),
}
_LARGEST = {"density": 1}  # largest value of a key's field; sizes are at most 2**63
_ABOUT_TYPES: dict[str, tuple[type, ...]] = {
    "kernel": (str,),
    "date": (str,),
    "environment": (str,),
    "speedup": (int, float),
    "gain": (dict,),
    "record": (str,),
}


class UnreadableDatabase(ValueError):
    """The file is no tuning database: damaged, cut short or empty."""


class UnknownSchema(UnreadableDatabase):
    """The file has another schema_version: its meaning is not guessed."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One direction's configuration with every field given, and how it was found; of HADS, whether a call is sparse.

    `about` holds the rest of the line: kernel hash, source, date, timings, trials, seed, errors, environment.
    """

    key: Key
    config: Mapping[str, Any]
    about: Mapping[str, Any]

    @classmethod
    def parse(cls, given: Any) -> Entry:
        if not isinstance(given, dict) or not isinstance(given.get("key"), dict):
            raise UnreadableDatabase("an entry must be an object with a key")
        key, config, source = given["key"], given.get("config"), given.get("source")
        names = [f.name for f in dataclasses.fields(Key)]
        if sorted(key) != sorted(names):
            raise UnreadableDatabase(f"a key must have the fields {names}, got {sorted(key)}")
        for name, value in key.items():
            _check_type(f"key.{name}", value, _KEY_TYPES.get(name, (int,)))
            largest = _LARGEST.get(name, 2**63)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not 0 < value <= largest:
                raise UnreadableDatabase(f"key.{name}={reprlib.repr(value)} must be above 0 and at most {largest}")
        if not isinstance(config, dict) or not config:
            raise UnreadableDatabase(f"config must be an object with every field of the configuration, got {config!r}")
        if source not in SOURCES:
            raise UnreadableDatabase(f"source={reprlib.repr(source)} must be one of {SOURCES}")
        if key["operation"] == HADS and not (list(config) == ["sparse"] and isinstance(config["sparse"], bool)):
            raise UnreadableDatabase(f"the config of an entry for HADS must say whether it is sparse, got {config!r}")
        for name, kinds in _ABOUT_TYPES.items():
            if name in given:
                _check_type(name, given[name], kinds)
        return cls(Key(**key), config, {k: v for k, v in given.items() if k not in ("key", "config")})

    def json(self) -> dict[str, Any]:
        return {"key": dataclasses.asdict(self.key), "config": dict(self.config), **self.about}


def _check_type(name: str, value: Any, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        words = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise UnreadableDatabase(f"{name}={reprlib.repr(value)} must be of type {words}")


class Database:
    """The entries for one kind of device."""

    def __init__(
        self, device_kind: str, entries: Iterable[Entry] = (), environments: Mapping[str, Any] | None = None
    ) -> None:
        self.device_kind = device_kind
        self.environments = dict(environments or {})
        self._families: dict[tuple, dict[tuple, Entry]] = {}
        for entry in entries:
            self._families.setdefault(entry.key.family, {})[entry.key.place] = entry

    def __len__(self) -> int:
        return sum(len(places) for places in self._families.values())

    @property
    def entries(self) -> list[Entry]:
        """All entries, sorted by key, so that equal databases make equal files."""
        every = (entry for places in self._families.values() for entry in places.values())
        return sorted(every, key=lambda e: [(x is not None, x) for x in dataclasses.astuple(e.key)])

    def exact(self, key: Key) -> Entry | None:
        return self._families.get(key.family, {}).get(key.place)

    def nearest(self, key: Key) -> Entry | None:
        """The nearest entry of the key's family, in the order of `places_near`; None if none is within `REACH`."""
        places = self._families.get(key.family)
        if not places:
            return None
        return next((places[place] for place in places_near(key.place) if place in places), None)

    def any_of_blocks(self, block_q: int, block_kv: int) -> bool:
        """Whether there are entries for masks of such blocks."""
        keys = (entry.key for places in self._families.values() for entry in places.values())
        return any((k.block_q, k.block_kv) == (block_q, block_kv) for k in keys if k.operation != HADS)

    def races_of_hads(self, kind: str) -> list[Entry]:
        """The races of sparse and dense attention in calls of this kind."""
        families = (places.values() for places in self._families.values())
        return [e for entries in families for e in entries if (e.key.operation, e.key.direction) == (HADS, kind)]

    # -- the file --------------------------------------------------------------------------------------------------

    @classmethod
    def parse(cls, text: str) -> Database:
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UnreadableDatabase(f"it is not JSON: {error}") from error
        if not isinstance(given, dict) or "schema_version" not in given:
            raise UnreadableDatabase("it has no schema_version")
        if given["schema_version"] not in range(1, SCHEMA_VERSION + 1):
            raise UnknownSchema(
                f"its schema_version is {reprlib.repr(given['schema_version'])}, and this version of xsake knows 1 to "
                f"{SCHEMA_VERSION}"
            )
        kind, environments, entries = (given.get(k) for k in ("device_kind", "environments", "entries"))
        if not isinstance(kind, str) or not isinstance(environments, dict) or not isinstance(entries, list):
            raise UnreadableDatabase("it must have a device_kind, environments and entries")
        return cls(kind, map(Entry.parse, entries), environments)

    @classmethod
    def read(cls, path: Path) -> Database:
        try:
            return cls.parse(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise UnreadableDatabase(f"it is not text: {error}") from error

    def dump(self) -> str:
        """The file's text: entries sorted, one per line, and only the environments that an entry names.

        Its schema_version is the oldest that knows all fields of its entries.
        """
        of_hads = any(e.key.operation == HADS for e in self.entries)
        version = 3 if of_hads else 2 if any("gain" in e.about for e in self.entries) else 1
        used = {e.about.get("environment") for e in self.entries}
        lines = ",\n".join(json.dumps(e.json()) for e in self.entries)
        environments = ",\n".join(
            f"{json.dumps(name)}: {json.dumps(value)}"
            for name, value in sorted(self.environments.items())
            if name in used
        )
        return (
            f'{{"schema_version": {version},\n"device_kind": {json.dumps(self.device_kind)},\n'
            f'"environments": {{\n{environments}\n}},\n"entries": [\n{lines}\n]}}\n'
        )


def file_name(device_kind: str) -> str:
    """
    >>> file_name("NVIDIA H200")
    'nvidia_h200.json'
    """
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") + ".json"
