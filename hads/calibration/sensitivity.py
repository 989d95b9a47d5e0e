"""The cost of dropped mass to the model, per head."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from xsake.hads.calibration.block_statistics import scan_rows
from xsake.hads.calibration.observe import Touched
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.exact import attention_rows, block_sums


@partial(jax.jit, static_argnames="grid")
def cost_of_dropping(
    layer: Touched, kept: Bool[Array, "B H rows n"], grid: CausalGrid
) -> tuple[Float[Array, "H"], Float[Array, "H"]]:
    """(sum of (g · e)², sum of δ²) over the queries, for each head, if only the blocks `kept` are attended to.

    e is the change of a head's output, δ the dropped mass, g the gradient of `touch`. Half of the first sum is the KL
    divergence to second order, if errors of different heads and queries are independent. The ratio of the sums is the
    head's sensitivity.
    """
    b, h, rows, n = kept.shape
    kv_heads = layer.key.shape[2]
    value = layer.value.astype(jnp.float32)
    kept_rows = jnp.moveaxis(kept.reshape(b, kv_heads, -1, rows, n), 3, 0).astype(jnp.float32)

    def row(keys: int, i: Array, q: Array, g: Array) -> tuple[Array, Array]:
        weights = attention_rows(q, layer.key[:, :keys], i, grid)
        wide, highest = g.astype(jnp.float32), jax.lax.Precision.HIGHEST
        felt = jnp.einsum("bkgtd,bskd->bkgts", wide, value[:, :keys], precision=highest)
        mass, moved = block_sums(weights, grid), block_sums(weights * felt, grid)
        mine = kept_rows[i][..., None, :]
        kept_mass = (mass * mine).sum(-1)
        change = moved.sum(-1) - (moved * mine).sum(-1) / kept_mass
        in_row = i * grid.block_q + jnp.arange(grid.block_q) < grid.length
        error = jnp.where(in_row, jnp.square(change), 0).sum((0, -1))
        dropped = jnp.where(in_row, jnp.square(1 - kept_mass), 0).sum((0, -1))
        return error, dropped

    error, dropped = scan_rows(row, layer.query, kv_heads, grid, layer.gradient)
    return error.sum(0).reshape(h), dropped.sum(0).reshape(h)
