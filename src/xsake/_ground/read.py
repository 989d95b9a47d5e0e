"""Files that are given to xsake, read within limits: one that is damaged, huge or hostile is a ValueError of one line.

A file may claim anything: its size is checked before its contents are read, and the sizes that an archive states before
it is unpacked. The contents are checked by `fields.check` with the `kinds` of values.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import zipfile
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from xsake._ground.fields import check
from xsake._ground.kinds import TABLE

MOST_BYTES = 1 << 24  # of a file that a person may have written; real ones have some thousand
_MOST_CHARACTERS = 300  # of a reason: errors of libraries may quote the whole file


def reason(error: BaseException) -> str:
    """What an error says, in one short line.

    >>> reason(ValueError("not so\\n  but so")), reason(EOFError())
    ('not so but so', 'EOFError')
    """
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."


def read_bytes(path: str | os.PathLike, most: int = MOST_BYTES) -> bytes:
    """A file of at most `most` bytes; ValueError for a larger one."""
    with open(path, "rb") as file:
        large = os.fstat(file.fileno()).st_size > most
        content = b"" if large else file.read(most + 1)
    if large or len(content) > most:
        raise ValueError(f"{path} has more than {most:,} bytes, the most that are read of such a file")
    return content


def read_text(path: str | os.PathLike, most: int = MOST_BYTES) -> str:
    """The text of a file in UTF-8; ValueError for anything else."""
    return decode(path, read_bytes(path, most))


def decode(what: object, content: bytes) -> str:
    """The text `what` from its bytes in UTF-8; ValueError for anything else."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not UTF-8 text: see its byte {error.start}") from error


def parse_json(what: object, text: str | bytes) -> Any:
    """The value of the JSON text `what`; ValueError, with the reason, for anything else."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{what} is not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{what} is not JSON: {reason(error)}") from error


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """The table in a JSON file; ValueError for anything else."""
    found = parse_json(path, read_bytes(path))
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, not {reprlib.repr(found)}")
    return found


def read_arrays(path: str | os.PathLike, most: int) -> dict[str, np.ndarray]:
    """The arrays of an .npz file that unpacks to at most `most` bytes, without pickle; ValueError for anything else."""
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                size = sum(member.file_size for member in members)
                if size > most:
                    raise ValueError(f"it unpacks to {size:,} bytes, and at most {most:,} are read")
                return {member.filename.removesuffix(".npy"): _array(archive, member) for member in members}
        except Exception as error:  # zipfile, zlib and numpy raise errors of every kind over a damaged file
            raise ValueError(f"{path} is not a file of arrays (.npz), or is damaged: {reason(error)}") from error


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    form: Any = np.lib.format
    with archive.open(member) as file:
        read_header = {(1, 0): form.read_array_header_1_0, (2, 0): form.read_array_header_2_0}[form.read_magic(file)]
        shape, by_columns, dtype = read_header(file)
        size = member.file_size - file.tell()
        if dtype.hasobject or math.prod(shape) * dtype.itemsize != size:
            raise ValueError(f"{reprlib.repr(member.filename)} promises {dtype}{shape} and has {size:,} bytes")
        # Read no more than the stated size: a member may unpack to more.
        return np.frombuffer(file.read(size), dtype).reshape(shape, order="F" if by_columns else "C")


def check_table(name: str, value: Any) -> dict[str, Any]:
    check(name, value, TABLE)
    return value


def check_names(values: Mapping[str, Any], wanted: Collection[str]) -> Mapping[str, Any]:
    """`values`; ValueError unless they have exactly the names `wanted`."""
    if wrong := sorted(values.keys() ^ set(wanted)):
        raise ValueError(f"fields {reprlib.repr(wrong)} are missing or unknown")
    return values


def check_version(what: str, header: Any, form: str, versions: Sequence[int], advice: str = "") -> int:
    """The version that the header of `what` states; ValueError unless it is one of `versions` of the format `form`."""
    given = (header.get("format"), header.get("version")) if isinstance(header, dict) else (header, None)
    if given[0] != form or type(given[1]) is not int or given[1] not in versions:
        shown = " version ".join(map(reprlib.repr, given))
        known = f"version{'s' if len(versions) > 1 else ''} {', '.join(map(str, versions))}"
        raise ValueError(f"{what} has format {shown}; this xsake reads {form!r} {known}{advice}")
    return given[1]
