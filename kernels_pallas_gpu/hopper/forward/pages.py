"""Keys and values in pages, for the Hopper forward: where each run of keys lies, and padding that may hold NaN.

The memory warpgroup reads from an array where each run of a sequence lies:

    place = 2 * run + mixed

`run` is the number of the run among the runs of all pages. A run of padding alone gets a place past the last page, for
which the copy engine writes zeros. A `mixed` run has keys and padding: its padding is zeroed in shared memory before
the product, where a weight of 0 times NaN would be NaN.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.tile.vectors import per_row

ROWS, COLUMNS = 64, 64  # zeroed at a time, at most: the memory warpgroup has few registers


def places(
    table: jax.Array, kv_segments: jax.Array | None, *, num_pages: int, page: int, unit: int, num_runs: int
) -> jax.Array:
    """i32[B, num_runs]; a sequence may have more runs than its pages, where its last block ends past them."""
    per_page = page // unit
    first = jnp.clip(table, 0, num_pages - 1) * (2 * per_page)
    found = (first[:, :, None] + 2 * jnp.arange(per_page, dtype=jnp.int32)[None, None]).reshape(len(table), -1)
    nowhere = 2 * num_pages * per_page
    if kv_segments is not None:
        holds = (kv_segments >= 0).reshape(*found.shape, unit)
        mixed = ~holds.all(-1)
        found = jnp.where(holds.any(-1), found + mixed.astype(jnp.int32), nowhere)
    return jnp.pad(found, ((0, 0), (0, num_runs - found.shape[1])), constant_values=nowhere)


def run_of(place: Any) -> Any:
    return lax.div(place, jnp.int32(2))


def is_mixed(place: Any) -> Any:
    return lax.rem(place, jnp.int32(2)) == 1


def zero_padding(values: Any, segments: Any) -> None:
    """`values`: a tile in shared memory, whose rows are padding where `segments`, in global memory, are below 0."""
    rows, columns = values.shape
    width, layout = math.gcd(columns, COLUMNS), plgpu.Layout.WGMMA
    for row in range(0, rows, ROWS):
        ids = plgpu.load(segments.at[pl.ds(row, ROWS)], layout=layout.reduce(1), optimized=False)
        holds = per_row(ids, (ROWS, width)) >= 0
        for column in range(0, columns, width):
            part = values.at[pl.ds(row, ROWS), pl.ds(column, width)]
            x = plgpu.load(part, layout=layout)
            part[...] = jnp.where(holds, x, jnp.zeros_like(x))
