"""Options that several commands read in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xsake.hads import HadsProfile


def named_as(configuration: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are named as the fields of a dataclass, with their values."""
    names = {field.name for field in dataclasses.fields(configuration)}
    return {name: value for name, value in given.items() if name in names}


def load_profile(path: Path, model: str) -> HadsProfile:
    """The HADS profile in a file. ValueError if it is another model's."""
    from xsake.hads.profile.profile import HadsProfile

    profile = HadsProfile.load(path)
    if profile.model != model:
        raise ValueError(f"{path} is the profile of {profile.model!r}, not of {model!r}: calibrate this model")
    return profile
