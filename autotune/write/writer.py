"""Writing a database: entries are merged into its file under a lock, and the whole file is replaced."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import Timeout

from xsake._ground import atomic
from xsake.autotune.write.lock import lock_of
from xsake.tuning_db import Database, Entry, UnknownSchema, UnreadableDatabase

_PATIENCE = 30.0  # seconds for another writer to finish


class CannotWrite(OSError):
    """The file cannot be written. The file is as it was, without the new entries."""


def check_writable(path: Path) -> None:
    """Raise the error that a later `merge` would raise: better before the tuning than after it."""
    with _locked(path):
        _existing(path, "", set_aside=False)
        atomic.check_writable(path)


def merge(path: Path, device_kind: str, entries: Iterable[Entry], environments: Mapping[str, Any]) -> Database:
    """Merge entries into the file. If a key has two, a measured entry stays before another, else the later entry.

    A file that cannot be read is renamed first. A file of another schema is never touched: `CannotWrite`.
    """
    with _locked(path):
        old = _existing(path, device_kind, set_aside=True)
        if old.device_kind != device_kind:
            raise CannotWrite(f"{path} is for {old.device_kind!r}, and the entries are for {device_kind!r}")
        return _write(path, merged(old, Database(device_kind, entries, environments)))


def prune(path: Path, keep: Callable[[Entry], bool]) -> Database:
    """Drop the entries for which `keep` is false. A file that cannot be read is left alone."""
    with _locked(path):
        old = Database.read(path)
        return _write(path, Database(old.device_kind, filter(keep, old.entries), old.environments))


def merged(old: Database, new: Database) -> Database:
    kept = [entry for entry in new.entries if _outranks(entry, old.exact(entry.key))]
    return Database(old.device_kind, [*old.entries, *kept], old.environments | new.environments)


def _outranks(new: Entry, old: Entry | None) -> bool:
    def rank(entry: Entry) -> tuple:
        return entry.about.get("source") == "measured", entry.about.get("date", "")

    return old is None or rank(new) >= rank(old)


def _write(path: Path, database: Database) -> Database:
    """Write atomically: a reader sees the old file or the new file, even if the writer is killed."""
    try:
        atomic.write_text(path, database.dump())
    except OSError as error:
        raise CannotWrite(f"{path} could not be written and is as it was: {error}") from error
    return database


def _existing(path: Path, device_kind: str, *, set_aside: bool) -> Database:
    if not path.exists():
        return Database(device_kind)
    try:
        return Database.read(path)
    except UnknownSchema as error:
        raise CannotWrite(f"{path} is left alone: {error}") from error
    except UnreadableDatabase:
        if set_aside:
            path.rename(path.with_name(f"{path.name}.unreadable-{time.time_ns()}"))
        return Database(device_kind)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock_of(path, _PATIENCE):
            yield
    except Timeout as error:
        raise CannotWrite(f"{path} is locked by another writer for more than {_PATIENCE:g} s") from error
    except CannotWrite:
        raise
    except OSError as error:
        raise CannotWrite(f"{path} cannot be written: {error}") from error
