"""Where studies are stored: a journal file by default, or any database that Optuna opens by its URL."""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path

import optuna
from optuna.storages.journal import JournalFileBackend, JournalRedisBackend, JournalStorage

from xsake.autotune.write.lock import lock_of


class CannotOpen(ValueError):
    """The storage cannot be opened: it is not there, cannot be read, or needs a package that is missing."""


def open_storage(where: str | os.PathLike) -> optuna.storages.BaseStorage:
    """Open a journal file (a path), a journal in Redis (`redis://`), or a database (`sqlite:///`, `postgresql://`)."""
    text = os.fspath(where)
    try:
        return _open(text)
    except Exception as error:  # every database's driver raises errors of its own
        shown = re.sub(r"://([^/@:]*):[^/@]*@", r"://\1:***@", text)  # without the password
        raise CannotOpen(
            f"storage {shown!r} cannot be opened: {_reason(error)} (give a file, or a URL such as sqlite:///studies.db)"
        ) from error


def _open(text: str) -> optuna.storages.BaseStorage:
    if text.startswith("redis://"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return JournalStorage(JournalRedisBackend(text))
    if "://" in text:
        return optuna.storages.RDBStorage(text)
    path = Path(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = lock_of(text)  # freed by the system when its holder is killed; Optuna's own locks are not
    with lock:
        _mend(path)
    return JournalStorage(JournalFileBackend(text, lock_obj=lock))  # type: ignore[arg-type]


def _reason(error: BaseException) -> str:
    """The reason in one line: the package that is missing, or the error's first line."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ModuleNotFoundError):
            return f"the package {cause.name!r} is not installed"
        cause = cause.__cause__ or cause.__context__
    return str(error).partition("\n")[0] or type(error).__name__


def _mend(path: Path) -> None:
    """Cut off an unfinished last line: the next record would be appended to that line, and make the journal unreadable.

    Raises ValueError, and changes nothing, if a finished line is no record of a journal.
    """
    if not path.exists():
        return
    with path.open("rb+") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            if not _is_record(line):
                raise ValueError(f"its line {number} is no record of a journal: give another file")
        if whole < len(data):
            file.truncate(whole)


def _is_record(line: bytes) -> bool:
    try:
        return "op_code" in json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return False
