"""Where studies live: a journal file by default, any database that Optuna speaks to by URL."""

from __future__ import annotations

import os
from pathlib import Path

import optuna
from filelock import FileLock
from optuna.storages.journal import JournalFileBackend, JournalRedisBackend, JournalStorage


def open_storage(where: str | os.PathLike) -> optuna.storages.BaseStorage:
    """A path is a journal; `redis://` a journal there; any other URL (`sqlite:///`, `postgresql://`) a database."""
    text = os.fspath(where)
    if text.startswith("redis://"):
        return JournalStorage(JournalRedisBackend(text))
    if "://" in text:
        return optuna.storages.RDBStorage(text)
    path = Path(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = _Lock(text + ".lock")
    _mend(path, lock)
    return JournalStorage(JournalFileBackend(text, lock_obj=lock))  # type: ignore[arg-type]


class _Lock:
    """One that the system takes back when its holder is killed; Optuna's own locks are waited for."""

    def __init__(self, path: str):
        self._lock = FileLock(path)

    def acquire(self) -> bool:
        self._lock.acquire()
        return True

    def release(self) -> None:
        self._lock.release()


def _mend(path: Path, lock: _Lock) -> None:
    """Cut off a last line that was never finished: the next one would be glued to it, and the journal unreadable."""
    if not path.exists():
        return
    lock.acquire()
    try:
        with path.open("rb+") as file:
            data = file.read()
            if not data.endswith(b"\n"):
                file.truncate(data.rfind(b"\n") + 1)
    finally:
        lock.release()
