"""The folder of what xsake keeps for a user: fetched models, compiled programs, HADS profiles."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$XSAKE_CACHE, or `xsake` in the user's cache directory."""
    if given := os.environ.get("XSAKE_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xsake"
