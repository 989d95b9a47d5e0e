"""Probes, which HADS does without: some queries of every row measured exactly, beside the estimate.

The estimate knows a row's queries by their mean, in which a sharp query drowns. Some queries of every row, measured
against every key, see sharp ones where they are many, and a geometric mean with the estimate is nearer to the truth.
But the products of every sixteenth query's logits would pay for 3.1% of the blocks more, which save more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from xsake.hads.selection.estimate import block_logits
from xsake.hads.selection.exact import block_sums, with_exact_rows
from xsake.hads.selection.pooled import pool
from xsake.hads.study.methods.by_gain import Mass, choose_by_gain
from xsake.hads.study.methods.layer import Blocks, Layer

_LEAST = 1e-30  # of a mean square: a block that no probe sees keeps a share of its estimate
_ROWS_AT_ONCE = 8
_WEIGHTS = {8: 0.5, 16: 0.35}  # of the probes' logarithms: the best of 0.35, 0.5 and 0.7 for every 16th query


def hads_probes(every: int, weight: float, x: Layer) -> Blocks:
    """HADS with probes: the estimate's logarithm of a block's mass and the probes' are averaged by `weight`."""
    estimated = block_logits(pool(x.query, x.key, x.grid), x.profile.estimator(x.number), x.rows)
    mixed = (1 - weight) * jax.nn.log_softmax(estimated, -1) + weight * _measured(x, every)
    mass: Mass = jax.nn.softmax(jnp.where(x.rows.allowed(), mixed, -1e30), -1)
    return choose_by_gain(x, with_exact_rows(mass, x.query, x.key, x.rows))


def _measured(x: Layer, every: int) -> Float[Array, "B H rows n"]:
    """The logarithm of the root of the mean square of what a row's probes give to each block."""
    grid, (b, _, h, d), kv_heads = x.grid, x.query.shape, x.key.shape[2]
    per_row = max(grid.block_q // every, 1)
    apart = grid.block_q // per_row
    whole = jnp.pad(x.query, ((0, 0), (0, grid.rows * grid.block_q - grid.length), (0, 0), (0, 0)))
    probes = whole[:, apart - 1 :: apart].reshape(b, grid.rows, per_row, kv_heads, h // kv_heads, d)

    def of_row(row: tuple[Int[Array, ""], Float[Array, "B per_row K G D"]]) -> Float[Array, "B H n"]:
        number, q = row
        place = number * grid.block_q + apart * (1 + jnp.arange(per_row)) - 1
        logits = jnp.einsum("bpkgd,bskd->bkgps", q, x.key, preferred_element_type=jnp.float32) * d**-0.5
        seen = place[:, None] >= jnp.arange(grid.length)[None]
        mass = block_sums(jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), -1), grid)
        return 0.5 * jnp.log(jnp.maximum(jnp.square(mass).mean(-2), _LEAST)).reshape(b, h, -1)

    rows = jnp.arange(grid.rows, dtype=jnp.int32), jnp.moveaxis(probes, 1, 0)
    return jnp.moveaxis(jax.lax.map(of_row, rows, batch_size=_ROWS_AT_ONCE), 0, 2)


PROBES: dict[str, Callable[[Layer], Blocks]] = {
    f"hads_probes_{every}": partial(hads_probes, every, weight) for every, weight in _WEIGHTS.items()
}
