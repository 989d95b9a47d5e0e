"""The program that chooses a layer's blocks: by kernels on NVIDIA GPUs where they serve the shapes, else by XLA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from xsake._ground.device import on_gpu
from xsake._ground.trace import jit_may_partition
from xsake.hads.mask.lists.compact import compact
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.choice import choose
from xsake.hads.selection.cut import TOGETHER, Cut
from xsake.hads.selection.devices.partitioned import partitioned
from xsake.hads.selection.estimate import layer_mass
from xsake.hads.selection.given import Given
from xsake.hads.selection.packed import Packed
from xsake.hads.selection.rows import Rows

_MAX_COLUMNS = 8192  # blocks per row: four warps sort a row in their registers


def chosen(grid: CausalGrid, heads: int, given: Given, *, room: int | None = None, cut: Cut = TOGETHER) -> Any:
    """The blocks that a layer's mask keeps, bool[B, heads, rows, n]; with `room`, their lists, `room` slots a head."""
    own = partial(partitioned, _by_kernels, _by_xla) if jit_may_partition() else _by_kernels
    kernels, xla = (partial(by, grid, heads, room, cut=cut) for by in (own, _by_xla))
    served = given.segments is None and unsupported(given.query.shape[-1], grid) is None
    return on_gpu(kernels, xla, given) if served else xla(given)


def by_kernels_or_xla(kernels: Callable, xla: Callable, why_not: str | None, *given: Any) -> Any:
    """`kernels(*given)` on a GPU if there is no reason why not, else `xla(*given)`; kernels are not partitioned."""
    if why_not is not None or jit_may_partition():
        return xla(*given)
    return on_gpu(kernels, xla, *given)


def unsupported(head_dim: int, grid: CausalGrid) -> str | None:
    """Why HADS has no kernels for these shapes; None if it has."""
    for name, value, most in (("head_dim", head_dim, 256), ("block", grid.block, 128), ("block_q", grid.block_q, 128)):
        if value & (value - 1) or not 16 <= value <= most:
            return f"{name}={value} must be a power of two from 16 to {most}"
    if grid.reach < grid.rows * grid.tall - 1:
        return f"a window of {grid.window} tokens, which the kernels do not know"
    if grid.columns > _MAX_COLUMNS:
        return f"{grid.columns} blocks per row must be at most {_MAX_COLUMNS}"
    return None


def _by_xla(grid: CausalGrid, heads: int, room: int | None, given: Given, *, cut: Cut = TOGETHER) -> Any:
    rows, kept = Rows(grid), given.kept
    if given.segments is not None:
        packed = Packed.of(given.segments, grid)
        rows, kept = Rows(grid, packed=packed), {"count": packed.counts(**given.kept, grid=grid)}
    mass = layer_mass(given.query, given.key, given.estimator, rows)
    sensitivity, burstiness = given.sensitivity, given.burstiness
    if heads < mass.shape[1]:
        mass, sensitivity, burstiness = share_by_group(mass, sensitivity, burstiness, heads)
    blocks = choose(mass, rows, sensitivity=sensitivity, burstiness=burstiness, cut=cut, **kept)
    return blocks if room is None else compact(blocks, grid.full(), room)


def _by_kernels(grid: CausalGrid, heads: int, room: int | None, given: Given, *, cut: Cut = TOGETHER) -> Any:
    from xsake.hads.mask.lists.triton_call import pad
    from xsake.hads.selection.gpu import choose as gpu_choose
    from xsake.hads.selection.gpu import estimate as gpu_estimate
    from xsake.hads.selection.gpu.exact import with_exact_rows

    rows = Rows(grid)
    logits = gpu_estimate.block_logits(given.query, given.key, given.estimator, rows)
    logits = with_exact_rows(logits, given.query, given.key, rows)
    sensitivity, burstiness = given.sensitivity, given.burstiness
    of_masses = heads < logits.shape[1]
    if of_masses:
        n = grid.columns
        mass = jax.nn.softmax(jnp.where(grid.causal(), logits[:, :, : grid.rows, :n], -jnp.inf), -1)
        mass, sensitivity, burstiness = share_by_group(mass, sensitivity, burstiness, heads)
        logits = pad(mass)
    rule = {"sensitivity": sensitivity, "burstiness": burstiness, **given.kept}
    choice = gpu_choose.choose(logits, rows, normalise=not of_masses, cut=cut, **rule)
    return choice.blocks(rows) if room is None else choice.lists(rows, room)


def share_by_group(mass: Array, sensitivity: Array, burstiness: Array, groups: int) -> tuple[Array, Array, Array]:
    """(mass, sensitivity, burstiness) of each KV head's mask: sums of sensitivity, means weighted by it."""
    weight = sensitivity.reshape(groups, -1)
    total = weight.sum(-1)
    part = weight / total[:, None]
    grouped = mass.reshape(mass.shape[0], groups, -1, *mass.shape[2:])
    shared = jnp.einsum("bkgij,kg->bkij", grouped, part, precision=jax.lax.Precision.HIGHEST)
    return shared, total, (burstiness.reshape(groups, -1) * part).sum(-1)
