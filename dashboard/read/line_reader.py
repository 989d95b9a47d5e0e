"""Whole lines of a file that grows, a bounded piece at a time, and ids of places in the file.

An id names a place and proves that the file still is what it was: its offset, a checksum of the bytes before that
offset, and the time spent in steps until there. So a reader may resume by id at any server, without any state there.
"""

from __future__ import annotations

import os
import re
import zlib
from typing import BinaryIO, NamedTuple

PIECE = 1 << 20
LONGEST_LINE = 4 << 20
_CHECKED = 64  # bytes before a place that its checksum covers
_ID = re.compile(r"([0-9a-f]{1,16})-([0-9a-f]{8})-([0-9a-f]{1,16})")


class Place(NamedTuple):
    """After a line: its offset in the file, the checksum of the bytes before, microseconds spent in steps."""

    offset: int = 0
    checksum: int = 0
    microseconds: int = 0

    def __str__(self) -> str:
        return f"{self.offset:x}-{self.checksum:08x}-{self.microseconds:x}"

    @classmethod
    def parse(cls, text: str) -> Place | None:
        """None if the text is no id."""
        found = _ID.fullmatch(text)
        return cls(*(int(part, 16) for part in found.groups())) if found else None

    @property
    def seconds(self) -> float:
        return self.microseconds / 1e6


def checksum(before: bytes) -> int:
    """The checksum of the last `_CHECKED` of the bytes before a place, or of all if there are fewer."""
    return zlib.crc32(before[-_CHECKED:])


def is_still_there(file: BinaryIO, place: Place) -> bool:
    """Whether the file is still the same before this place."""
    if place.offset == 0:
        return True
    if os.fstat(file.fileno()).st_size < place.offset:
        return False
    start = max(0, place.offset - _CHECKED)
    return checksum(os.pread(file.fileno(), place.offset - start, start)) == place.checksum


class Lines(NamedTuple):
    """Lines from one reading: the bytes, which end with a line feed or are empty, and the offset after them."""

    data: bytes
    offset: int
    skipping: bool  # in a line that is too long: the rest of it is to be skipped


def read_lines(file: BinaryIO, offset: int, *, skipping: bool = False, size: int = PIECE) -> Lines:
    """The whole lines from `offset` on, about `size` bytes of them. An unfinished last line is left for later.

    A line longer than `LONGEST_LINE` is passed over.
    """
    data = os.pread(file.fileno(), size, offset)
    if skipping:
        end = data.find(b"\n") + 1
        return Lines(b"", offset + (end or len(data)), not end)
    end = data.rfind(b"\n") + 1
    if end:
        return Lines(data[:end], offset + end, False)
    if len(data) < size:
        return Lines(b"", offset, False)
    data = os.pread(file.fileno(), LONGEST_LINE, offset)
    end = data.find(b"\n") + 1
    if end:
        return Lines(data[:end], offset + end, False)
    return Lines(b"", offset + len(data), True) if len(data) == LONGEST_LINE else Lines(b"", offset, False)
