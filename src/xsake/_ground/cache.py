"""The folder of what xsake keeps for a user: fetched models, compiled programs, HADS profiles."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$XSAKE_CACHE, or `xsake` in the user's cache directory."""
    if given := os.environ.get("XSAKE_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xsake"


def keep_compiled() -> None:
    """Let JAX keep what it compiles for the next process, in the folder that the user names or in this cache: compiling
    takes longer than most of what a command does."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
