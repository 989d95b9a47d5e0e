"""The lock of a file that several processes write."""

from __future__ import annotations

import os

from filelock import FileLock


def lock_of(path: str | os.PathLike, seconds: float = -1) -> FileLock:
    """The lock beside `path`; taking it waits at most so many seconds (-1: for ever).

    Raises OSError at once if the lock file cannot be made: `FileLock` would wait for it.
    """
    name = f"{os.fspath(path)}.lock"
    open(name, "a").close()
    return FileLock(name, timeout=seconds)
