"""What the versions of JAX that pyproject.toml allows cannot do: all that xsake asks of JAX's version."""

from __future__ import annotations

import jax

# The oldest JAX on which an implementation's tests pass, where that is not the oldest that xsake allows.
_NEEDS = {"mosaic_gpu": (0, 11, 2), "raw_triton": (0, 11, 2)}


def lacking() -> dict[str, str]:
    """By implementation, why the JAX that is installed cannot run it."""
    return {
        name: f"it needs jax {'.'.join(map(str, needs))} or newer, and jax {jax.__version__} is installed"
        for name, needs in _NEEDS.items()
        if jax.__version_info__ < needs
    }
