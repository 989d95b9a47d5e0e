"""HADS's choice: from masses, measured or estimated, to the blocks that are kept."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from xsake.hads.selection.cut import TOGETHER, Cut, kept_per_row
from xsake.hads.selection.gain import sorted_gains
from xsake.hads.selection.keep import kept_blocks, nonnegative_order
from xsake.hads.selection.packed import packed_row_counts
from xsake.hads.selection.rows import Rows


def choose(
    mass: Float[Array, "B H rows n"],
    rows: Rows,
    *,
    sensitivity: Float[Array | np.ndarray, "H"],
    burstiness: Float[Array | np.ndarray, "H"],
    count: Int[Array | np.ndarray, "..."] | int | None = None,
    threshold: Float[Array | np.ndarray, ""] | float | None = None,
    cut: Cut = TOGETHER,
) -> Bool[Array, "B H rows n"]:
    """The blocks with the largest gains (`selection.gain`), the forced blocks among them.

    Give `count`, how many blocks every sequence keeps: one number over all heads; [H], one number per head; or [B, 1],
    one number per sequence. Of packed sequences, give [B, rows]: the count of each row's document. Or give `threshold`:
    blocks of at least this gain are kept. A count must cover the forced blocks. `cut` says which blocks compete for a
    count. The rows of a chunk compete among themselves, and rows past a sequence's end keep nothing.
    """
    keys, in_order, gain = sorted_gains(mass, rows, sensitivity, burstiness)
    if rows.packed is not None:
        kept = packed_row_counts(nonnegative_order(gain), jnp.asarray(count, jnp.int32), rows.packed, cut.heads_axes)
    elif threshold is not None:
        kept = (gain >= threshold).sum(-1)
    else:
        kept = kept_per_row(nonnegative_order(gain), jnp.asarray(count, jnp.int32), rows.grid, cut)
    return kept_blocks(keys, in_order, kept)  # the gain falls along a row, so a row keeps its heaviest blocks
