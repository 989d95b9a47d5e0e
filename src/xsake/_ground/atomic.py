"""Whole files or none: a `.part` file is written beside `path`, then renamed. Leftovers of killed writers are removed.

While a writer lives it holds a lock on its `.part` file. The system frees the lock of a process that dies, however it
dies and on whichever host, so a `.part` file that nobody has locked is a leftover.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` when the block ends. If the block raises, `path` is as it was.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder) / "file") as file:
    ...         written = file.write(b"all of it")
    ...     (Path(folder) / "file").read_bytes()
    b'all of it'
    """
    with naming(path), _part_of(Path(path)) as file:  # closing writes what is left, and may fail once more
        yield file
        file.flush()
        os.fsync(file.fileno())
        os.replace(file.name, path)


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Name the file in an OSError from inside that names none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


def write_text(path: str | os.PathLike, text: str) -> None:
    """Replace the file's contents by this text, in UTF-8."""
    with replacing(path) as file:
        file.write(text.encode())


def check_writable(path: str | os.PathLike) -> None:
    """Raise the OSError that writing to `path` would raise now; nothing is changed."""
    with _part_of(Path(path)):
        pass


@contextlib.contextmanager
def _part_of(path: Path) -> Iterator[BinaryIO]:
    """A new locked file beside `path`, deleted at the end unless it was renamed."""
    _remove_leftovers(path)
    file = _new_part(path)
    try:
        with file:
            yield file
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.name)


def _new_part(path: Path) -> BinaryIO:
    while True:
        file = open(path.with_name(f"{path.name}.{secrets.token_hex(4)}.part"), "xb")  # noqa: SIM115 closed in _part_of
        with contextlib.suppress(OSError):  # a file system without locks: there no leftover is ever removed
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.exists(file.name):
            return file
        file.close()  # removed by another writer as a leftover, before it was locked


def _remove_leftovers(path: Path) -> None:
    leftover = re.compile(re.escape(path.name) + r"\.[0-9a-f]{8}\.part")
    with contextlib.suppress(OSError):  # a leftover that cannot be listed or removed stays; writing goes on
        for name in filter(leftover.fullmatch, os.listdir(path.parent)):
            with contextlib.suppress(FileNotFoundError, BlockingIOError), open(path.with_name(name), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(file.name)
