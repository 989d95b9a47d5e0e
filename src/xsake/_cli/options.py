"""Options that several commands read in the same way."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xsake._ground import atomic

if TYPE_CHECKING:
    from xsake.hads import HadsProfile

SHAPE = "BxTxHxD[,kv=K or SxK][,dv=DV][,block=Q or QxKV][,causal][,density=D][,dtype=NAME]"  # `autotune.problem.CALL`
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
_LONGEST = 1000 * 3600


def duration(text: str) -> float:
    """Seconds of a time on the command line.

    >>> duration("3m")
    180.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"{_short(text)} is no duration of up to 1000h; write 90s, 5m or 1h")
    return seconds


def _short(text: str) -> str:
    return repr(text if len(text) < 60 else f"{text[:57]}...")


def named_as(configuration: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are named as the fields of a dataclass, with their values."""
    names = {field.name for field in dataclasses.fields(configuration)}
    return {name: value for name, value in given.items() if name in names}


def check_file_out(path: Path) -> None:
    """Raise the error that writing this file would end in. For the beginning of a command; nothing is changed."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {str(path.parent)!r}")
    try:
        atomic.check_writable(path)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}") from error


def check_folder_out(path: Path) -> None:
    """`check_file_out` for a folder, which need not be there yet, nor the folders above it."""
    there = next(one for one in (path, *path.parents) if one.exists())
    if not there.is_dir():
        raise ValueError(f"{there} is no folder: name another for {path}")
    try:
        atomic.check_writable(there / "file")
    except OSError as error:
        raise OSError(f"cannot write into {path}: {error.strerror}") from error


def load_profile(path: Path, model: str) -> HadsProfile:
    """The HADS profile in a file. ValueError if it is another model's."""
    from xsake.hads.profile.profile import HadsProfile

    profile = HadsProfile.load(path)
    if profile.model != model:
        raise ValueError(f"{path} is the profile of {profile.model!r}, not of {model!r}: calibrate this model")
    return profile
