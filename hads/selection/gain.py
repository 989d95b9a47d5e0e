"""What it is worth to keep a block.

Leaving out the blocks D of a row changes its output by δ (μ_D - μ_S) exactly, with δ the dropped mass and μ the mean
values under the renormalised weights. To second order the model's KL grows with Σ ω δ² over rows and heads, ω being a
head's sensitivity. If a row keeps its blocks in falling order of mass m, the k-th one saves

    ω (δ²_{k-1} - δ²_k) = ω m_k (δ_{k-1} + δ_k),

which falls with k. So the best K blocks of all rows and heads together are those with the K largest gains, and in every
row they are the heaviest. A row's queries differ, and δ² is theirs one by one: m is the root of their mean square
(`BlockStatistics.share`). And the errors of different blocks point in different directions, so that a block's own part
of δ² counts more than its products with the others: with the variance of the mass among queries proportional to the
mass, the gain is ω m_k (δ_{k-1} + δ_k + φ), which falls as well. Some rows count more than others
(`CausalGrid.row_weights`): their gains are as much larger.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from xsake.hads.profile.causal_grid import CausalGrid

FORCED = 1 << 30  # above the bits of every mass, which is at most 1


def block_keys(mass: Float[Array, "*B n n"], grid: CausalGrid, forced: np.ndarray) -> Int[Array, "*B n n"]:
    """Integers that order a row's blocks: forced ones first, then by mass; -1 where causality forbids.

    A nonnegative float's bits order as the float does. The lowest ones are replaced by the column, so that no two
    blocks of a row are equal; what is left of the mass is good to 2 ** -12 with 2048 blocks a row.
    """
    low = (1 << max(grid.side - 1, 1).bit_length()) - 1
    bits = jax.lax.bitcast_convert_type(mass.astype(jnp.float32), jnp.int32)
    keys = (bits & ~low) | jnp.arange(grid.side, dtype=jnp.int32)
    return jnp.where(grid.causal(), keys + jnp.asarray(forced * FORCED, jnp.int32), -1)


def gains_of_sorted(
    keys: Int[Array, "*B H n n"],
    grid: CausalGrid,
    sensitivity: Float[Array | np.ndarray, "H"],
    burstiness: Float[Array | np.ndarray, "H"],
) -> Float[Array, "*B H n n"]:
    """Gain of each block of rows of `block_keys` that are sorted upwards; infinite if forced, -1 if forbidden."""
    is_forced = keys >= FORCED
    bits = jnp.where(is_forced, keys - FORCED, jnp.maximum(keys, 0))
    mass = jax.lax.bitcast_convert_type(bits, jnp.float32)  # the column in its low bits does no harm
    kept_above = jnp.cumsum(mass, -1)  # dropped mass if everything above is kept, and this is not
    weight, spread = jnp.asarray(sensitivity)[:, None, None], jnp.asarray(burstiness)[:, None, None]
    gain = weight * grid.row_weights()[:, None] * mass * (2 * kept_above - mass + spread)
    return jnp.where(is_forced, jnp.inf, jnp.where(keys < 0, -1.0, gain))
