"""The largest numbers of each row, as a GPU kernel: a row stays in registers while its largest are taken one by one.

XLA's top-k of 16 out of 1024 takes longer than the attention to what it chose. Lowered by Pallas-Triton.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float, Int

from xsake.hads.mask.lists.triton_call import iota, triton_call

_COLUMNS_PER_WARP = 1024  # 32 numbers in each thread
_MOST_WARPS = 8


def top_k(scores: Float[Array, "*lead n"], count: int) -> tuple[Float[Array, "*lead k"], Int[Array, "*lead k"]]:
    """As `lax.top_k`: of equal scores the first comes first. What a row of -inf alone names is not defined."""
    *lead, n = scores.shape
    rows, width, slots = math.prod(lead), pl.next_power_of_2(n), pl.next_power_of_2(count)

    def kernel(scores_ref: Any, best_ref: Any, number_ref: Any) -> None:
        column, slot = iota(width), iota(slots)
        x = plgpu.load(scores_ref.at[column], mask=column < n, other=-jnp.inf)

        def take(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            x, best, number = carry
            largest = x.max()
            place = jnp.where(x == largest, column, n - 1).min()
            here = slot == i
            return (
                jnp.where(column == place, -jnp.inf, x),
                jnp.where(here, largest, best),
                jnp.where(here, place, number),
            )

        nothing = jnp.full((slots,), -jnp.inf, x.dtype), jnp.zeros((slots,), jnp.int32)
        _, best_ref[...], number_ref[...] = lax.fori_loop(0, count, take, (x, *nothing))

    spec = pl.BlockSpec((None, slots), lambda row: (row, 0))
    best, number = triton_call(
        kernel,
        "xsake_top_k",
        (rows,),
        [(scores.reshape(rows, n), pl.BlockSpec((None, n), lambda row: (row, 0)))],
        [((rows, slots), scores.dtype, spec), ((rows, slots), jnp.int32, spec)],
        num_warps=min(max(width // _COLUMNS_PER_WARP, 1), _MOST_WARPS),
    )
    best, number = (x.reshape(*lead, slots)[..., :count] for x in (best, number))
    return best, number
