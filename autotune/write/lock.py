"""The lock of a file that several processes write."""

from __future__ import annotations

import os

from filelock import FileLock


def lock_of(path: str | os.PathLike, seconds: float = -1) -> FileLock:
    """The lock beside `path`, waited for at most so long (-1: for ever).

    Raises the OSError of a lock file that cannot be made at once: `FileLock` would wait for it.
    """
    name = f"{os.fspath(path)}.lock"
    open(name, "a").close()
    return FileLock(name, timeout=seconds)
