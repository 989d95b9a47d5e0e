"""Where a mask is made: by kernels on NVIDIA GPUs that have them, by XLA everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax

from xsake.hads.causal_grid import CausalGrid
from xsake.kernels_pallas_gpu.device import compute_capability

_MAX_SIDE = 2048  # blocks a row: a warp sorts a row in its registers


def unsupported(head_dim: int, grid: CausalGrid) -> str | None:
    """Why HADS has no kernels for these shapes; None if it has."""
    for name, value, most in (("head_dim", head_dim, 256), ("block", grid.block, 128)):
        if value & (value - 1) or not 16 <= value <= most:
            return f"{name}={value} must be a power of two from 16 to {most}"
    if grid.side > _MAX_SIDE:
        return f"{grid.side} blocks a row must be at most {_MAX_SIDE}"
    return None


def on_gpu(kernels: Callable, otherwise: Callable, *args: Any) -> Any:
    """`kernels(*args)` where this is compiled for a GPU of compute capability 8.0 or above, else `otherwise(*args)`."""
    capability = compute_capability()
    if capability is None or float(capability) < 8.0:
        return otherwise(*args)
    return lax.platform_dependent(*args, cuda=kernels, default=otherwise)
