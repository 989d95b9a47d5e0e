"""Gain: what keeping a block saves.

    gain of a row's k-th heaviest block = ω w m_k (δ_{k-1} + δ_k + φ)

with m the blocks' masses in falling order, δ_k the mass that is dropped if the first k are kept, ω the head's
sensitivity, w the row's weight (`Rule.last_weight`) and φ the head's burstiness.

Leaving out the blocks D of a row changes its output by δ (μ_D - μ_S) exactly, with δ the dropped mass and μ the mean
values under the renormalised weights. To second order the model's KL grows with Σ ω w δ² over rows and heads. So the
k-th block saves ω w (δ²_{k-1} - δ²_k) = ω w m_k (δ_{k-1} + δ_k). Two refinements:

- A row's queries differ, and each has its own δ²: so m is the root of its mean square over the queries
  (`BlockStatistics.share`).
- The errors of different blocks point in different directions, so that a block's own part of δ² counts more than its
  products with the others. With the variance of the mass among queries proportional to the mass, this adds φ.

The gain falls with k. So the K blocks with the largest gains over all rows and heads are the best K blocks, and in
every row they are its heaviest blocks.

`key_of` works element by element and `gains_of_sorted` along the last axis: XLA's program and the kernels share them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.rows import Rows

FORCED = 1 << 30  # above the bits of every mass, which is at most 1


def key_of(mass: Array, row: Any, column: Any, grid: CausalGrid) -> Array:
    """An integer that orders a row's blocks: forced ones first, then by mass.

    A nonnegative float's bits order as the float does. The lowest bits are replaced by the column, so that no two
    blocks of a row are equal; what is left of the mass is good to 2 ** -11 with 4096 blocks per row.
    """
    low = (1 << max(grid.columns - 1, 1).bit_length()) - 1
    mass = jnp.where(mass > 0, mass, 0.0)  # the masses of a query that is NaN are
    key = (jax.lax.bitcast_convert_type(mass, jnp.int32) & ~low) | column
    return jnp.where(grid.rule.forces(row, column, grid.tall), key + FORCED, key)


def gains_of_sorted(keys: Int[Array, "*lead n"], weight: Array, burstiness: Array) -> Float[Array, "*lead n"]:
    """Gains of blocks whose keys rise along the last axis; infinite if forced. `weight` is ω w, `burstiness` φ.

    Padding before a row's first block has the key -1 and counts as a mass of 0.
    """
    is_forced = keys >= FORCED
    bits = jnp.where(is_forced, keys - FORCED, jnp.maximum(keys, 0))
    mass = jax.lax.bitcast_convert_type(bits, jnp.float32)  # the column in its low bits does no harm
    dropped = jnp.cumsum(mass, -1)  # if every heavier block is kept, and this one is not
    gain = weight * mass * (2 * dropped - mass + burstiness)
    return jnp.where(is_forced, jnp.inf, gain)


def sorted_gains(
    mass: Float[Array, "B H rows n"], rows: Rows, sensitivity: Any, burstiness: Any
) -> tuple[Int[Array, "B H rows n"], Int[Array, "B H rows n"], Float[Array, "B H rows n"]]:
    """(keys, the keys with every row sorted upwards, gains of the sorted keys); all -1 for blocks that do not exist."""
    keys = key_of(mass.astype(jnp.float32), rows.row(), rows.column(), rows.grid)
    keys = jnp.where(rows.allowed(), keys, -1)
    in_order = jnp.sort(keys, -1)
    omega, phi = (jnp.asarray(x)[None, :, None, None] for x in (sensitivity, burstiness))
    gain = gains_of_sorted(in_order, omega * rows.weights(), phi)
    return keys, in_order, jnp.where(in_order < 0, -1.0, gain)
