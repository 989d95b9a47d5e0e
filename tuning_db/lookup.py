"""The look-up of the entry for a call: in overlays, then exact in the user's and the shipped file, then near."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import logging
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from xsake.tuning_db.database import Database, Entry, UnreadableDatabase, file_name
from xsake.tuning_db.key import Key

SHIPPED = Path(__file__).parent

_log = logging.getLogger("xsake")


@dataclasses.dataclass(frozen=True)
class Found:
    """An entry and where it came from: "overlay", "user" or "shipped"."""

    entry: Entry
    origin: str
    exact: bool

    def __str__(self) -> str:
        if self.exact:
            return f"{self.origin}, exact"
        key = self.entry.key
        density = "any density" if key.density is None else f"density {key.density:g}"
        return f"{self.origin}, nearest: {key.q_len} x {key.kv_len} tokens, {key.heads} heads, {density}"


def user_directory() -> Path:
    """Where a user's own results are: $XSAKE_TUNING_DIR, or xsake/tuning in the XDG data directory."""
    if given := os.environ.get("XSAKE_TUNING_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "xsake" / "tuning"


def find(device_kind: str, key: Key) -> Found | None:
    """The entry for a call, or None for the heuristic."""
    for group in _sources(device_kind):
        for exact, (origin, database) in itertools.product((True, False), group):
            if entry := database.exact(key) if exact else database.nearest(key):
                return Found(entry, origin, exact)
    return None


def find_race(device_kind: str, key: Key) -> Found | None:
    """The race of sparse and dense attention that tells most about a call of HADS, or None for the heuristic."""
    from xsake.tuning_db.races import telling_race  # HADS alone needs it, and `import xsake` does not

    for group in _sources(device_kind):
        races = [(entry, origin) for origin, database in group for entry in database.races_of_hads(key.direction)]
        number = telling_race([entry for entry, _ in races], key)
        if number is not None:
            entry, origin = races[number]
            return Found(entry, origin, entry.key == key)
    return None


def any_of_blocks(device_kind: str, *, block_q: int, block_kv: int) -> bool:
    """Whether there are entries for masks of such blocks. If not, such masks have one configuration at any density."""
    return any(found.any_of_blocks(block_q, block_kv) for group in _sources(device_kind) for _, found in group)


def _sources(device_kind: str) -> Iterator[list[tuple[str, Database]]]:
    """Each overlay alone, then the user's and the shipped file together; nothing below `heuristics_only`."""
    for database in _overlays.get():
        if database is None:
            return
        yield [("overlay", database)]
    files = [("user", user_directory()), ("shipped", SHIPPED)]
    yield [(origin, found) for origin, folder in files if (found := _current(folder / file_name(device_kind)))]


# -- files, read once ----------------------------------------------------------------------------------------------

_read: dict[Path, tuple[tuple, Database | None]] = {}


def _current(path: Path) -> Database | None:
    """The file's contents; the file is read again only after it has changed."""
    try:
        stat = path.stat()
    except OSError:
        return None
    stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    if path not in _read or _read[path][0] != stamp:
        _read[path] = (stamp, _load(path))
    return _read[path][1]


def _load(path: Path) -> Database | None:
    try:
        return Database.read(path)
    except (OSError, UnreadableDatabase) as error:
        warn_once(f"the tuning database {path} is ignored: {error}")
        return None


@cache
def warn_once(message: str) -> None:
    _log.warning(message)


# -- overlays ------------------------------------------------------------------------------------------------------

_overlays: contextvars.ContextVar[tuple[Database | None, ...]] = contextvars.ContextVar("xsake_tuning", default=())


@contextlib.contextmanager
def overlay(source: str | os.PathLike | Database) -> Iterator[Database]:
    """Inside the `with` block, entries of this database (or its file) come before the user's and the shipped entries.

    The innermost of nested overlays comes first. Overlays are read while tracing: a function that was compiled outside
    the block is not changed inside.

    >>> from xsake import tuning_db
    >>> with tuning_db.overlay(tuning_db.Database("cpu")) as trial:
    ...     len(trial)
    0
    """
    database = source if isinstance(source, Database) else Database.read(Path(source))
    with _pushed(database):
        yield database


@contextlib.contextmanager
def heuristics_only() -> Iterator[None]:
    """Inside the `with` block, no database is read, as on a machine without entries.

    Like an overlay, the block is read while tracing.
    """
    with _pushed(None):
        yield


@contextlib.contextmanager
def _pushed(database: Database | None) -> Iterator[None]:
    token = _overlays.set((database, *_overlays.get()))
    try:
        yield
    finally:
        _overlays.reset(token)
