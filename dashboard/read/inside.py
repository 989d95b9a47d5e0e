"""Files inside the folders that the user gave, and no others: no `..`, no symlink that leads out, no pipe."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


class Outside(OSError):
    """The path leads out of the given folder, or is not a plain file."""


def open_inside(root: Path, path: Path) -> BinaryIO:
    """Open a plain file for reading. `root` is resolved already; `path` lies in it, also after resolving.

    Raises FileNotFoundError if there is no such file, and Outside if the path leads elsewhere.
    """
    real = os.path.realpath(path)
    if not Path(real).is_relative_to(root):
        raise Outside(f"{path.name} leads out of the given folder")
    # A pipe must not block, and the last part must not become a link after the check above.
    descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Outside(f"{path.name} is not a plain file")
    return open(descriptor, "rb", buffering=0)


def read_inside(root: Path, path: Path, limit: int) -> bytes:
    """The whole file. Raises Outside if it is larger than `limit` bytes."""
    with open_inside(root, path) as file:
        data = file.read(limit + 1)
        while len(data) <= limit and (more := file.read(limit + 1 - len(data))):
            data += more
    if len(data) > limit:
        raise Outside(f"{path.name} is larger than {limit:,} bytes")
    return data


def is_plain_name(name: str) -> bool:
    """Whether a name may be shown and walked into: not hidden, and no separator in it.

    >>> is_plain_name("run-1"), is_plain_name(".."), is_plain_name("a/b")
    (True, False, False)
    """
    return bool(name) and not name.startswith(".") and "/" not in name and "\0" not in name
