"""HADS's choice: from masses, measured or estimated, to the blocks that are kept."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.cut import TOGETHER, Cut, kept_per_row
from xsake.hads.selection.gain import sorted_gains
from xsake.hads.selection.keep import nonnegative_order


def choose(
    mass: Float[Array, "B H n n"],
    grid: CausalGrid,
    *,
    sensitivity: Float[Array | np.ndarray, "H"],
    burstiness: Float[Array | np.ndarray, "H"],
    count: Int[Array | np.ndarray, "..."] | int | None = None,
    threshold: Float[Array | np.ndarray, ""] | float | None = None,
    cut: Cut = TOGETHER,
) -> Bool[Array, "B H n n"]:
    """The blocks with the largest gains (`selection.gain`), the forced blocks among them.

    Give `count`, how many blocks every sequence keeps: one number over all heads, or [H], one number per head. Or give
    `threshold`: blocks of at least this gain are kept. A count must cover the forced blocks. `cut` says which blocks
    compete for a count.
    """
    keys, rows, gain = sorted_gains(mass, grid, sensitivity, burstiness)
    if threshold is not None:
        kept = (gain >= threshold).sum(-1)
    else:
        kept = kept_per_row(nonnegative_order(gain), jnp.asarray(count, jnp.int32), grid, cut)
    # The gain falls along a row, so a row keeps its heaviest blocks.
    last = jnp.take_along_axis(rows, grid.side - jnp.maximum(kept, 1)[..., None], -1)
    return (keys >= last) & (kept > 0)[..., None]
