"""Which versions of jax-triton and Triton the kernels are called through."""

from __future__ import annotations

from functools import cache
from importlib import metadata

import jax

# jax-triton 0.4 needs Triton 3.7, and stops with jax 0.12, which calls its rule for unused results with one argument
# more. Releases before 0.3.1 call what jax 0.11 or Triton 3.6 no longer have.
JAX_TRITON = "0.3.1"
TRITON = "3.6"
WITH = f"jax-triton {JAX_TRITON} and triton {TRITON}, which fit jax 0.11.2 to 0.12: pip install 'xsake[triton]'"


def misfit(*, interpreted: bool) -> str | None:
    """Why the installed versions cannot run the kernels, or None. Triton's own interpreter needs no jax-triton."""
    found = {name: _version(name) for name in ("jax-triton", "triton")}
    if interpreted:
        del found["jax-triton"]
    fits = {"jax-triton": lambda v: v == JAX_TRITON, "triton": lambda v: v.split(".")[:2] == TRITON.split(".")}
    for name, version in found.items():
        if version is None:
            return f"{name} is not installed; it needs {WITH}"
        if not fits[name](version):
            return f"{name} {version} does not fit jax {jax.__version__} here; it needs {WITH}"
    return None


@cache
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
