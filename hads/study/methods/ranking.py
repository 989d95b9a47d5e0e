"""From block scores to priorities: a method keeps the blocks of highest priority, as many as the budget allows.

A published method has a knob (k, a share of the mass, a threshold) that is one number for a whole layer. Cutting a
layer's priorities at any height gives the method's mask for some value of its knob. So a method can keep any number of
blocks exactly.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.study.methods.layer import Priority

ALWAYS = 1e6  # added to the priority of blocks that a method always keeps


def rank_in_row(score: Float[Array, "*lead n"]) -> Int[Array, "*lead n"]:
    """0 for the highest score of a row, 1 for the next, ...; of equal scores the later (nearer) block comes first."""
    order = jnp.argsort(score[..., ::-1], -1, descending=True, stable=True)
    return jnp.argsort(order, -1)[..., ::-1]


def constant_count(score: Priority) -> Priority:
    """Top-k: the same number of blocks in every row."""
    return -rank_in_row(score).astype(jnp.float32)


def constant_share(share: Priority) -> Priority:
    """Top-p: in every row the fewest blocks that hold a given share of its mass."""
    return -held_before(share)


def held_before(share: Float[Array, "*lead n"]) -> Float[Array, "*lead n"]:
    """For each block of a row, the mass of the blocks that rank above it."""
    order = jnp.argsort(share[..., ::-1], -1, descending=True, stable=True)
    sorted_share = jnp.take_along_axis(share[..., ::-1], order, -1)
    before = jnp.cumsum(sorted_share, -1) - sorted_share
    return jnp.take_along_axis(before, jnp.argsort(order, -1), -1)[..., ::-1]


def near_peak(log_score: Float[Array, "*lead n"]) -> Float[Array, "*lead n"]:
    """Blocks whose score comes within a factor of the row's highest; the priority is the logarithm of that factor."""
    return log_score - log_score.max(-1, keepdims=True)


def first_columns(grid: CausalGrid, columns: int) -> np.ndarray:
    """f[rows, n]: ALWAYS in the first columns of blocks, 0 elsewhere."""
    return np.broadcast_to((np.arange(grid.columns) < columns) * ALWAYS, (grid.rows, grid.columns))


def diagonal(grid: CausalGrid) -> np.ndarray:
    """f[rows, n]: ALWAYS on the blocks that the diagonal cuts, 0 elsewhere."""
    return ((grid.distance() >= 0) & (grid.distance() < grid.tall)) * ALWAYS


def first_and_diagonal(grid: CausalGrid) -> np.ndarray:
    return first_columns(grid, 1) + diagonal(grid)
