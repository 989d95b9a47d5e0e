"""How the GPU kernels that make masks are called.

They are lowered by Pallas-Triton, which JAX has deprecated: only the files that import
`jax.experimental.pallas.triton` depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float

from xsake._ground.trace import interpreting, vary, varying_axes

TILE = 64  # blocks of queries, and blocks of keys, per program

Output = tuple[tuple[int, ...], Any, pl.BlockSpec]  # shape, dtype, the part that one program sees


def triton_call(
    kernel: Callable,
    name: str,
    grid: tuple[int, ...],
    inputs: Sequence[tuple[Array, pl.BlockSpec]],
    outputs: Sequence[Output],
    *,
    num_warps: int,
    num_stages: int = 1,
    aliases: Mapping[int, int] = {},
) -> tuple[Array, ...]:
    """Run kernel(*input refs, *output refs) for every place of the grid; `aliases` as in `pl.pallas_call`."""
    axes = varying_axes([x for x, _ in inputs])
    varying = jax.sharding.ManualAxisType(varying=axes)
    call = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[spec for _, spec in inputs],
        out_specs=[spec for _, _, spec in outputs],
        out_shape=[jax.ShapeDtypeStruct(s, t, manual_axis_type=varying) for s, t, _ in outputs],
        input_output_aliases=dict(aliases),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpreting(),
        name=name,
    )
    return tuple(call(*(vary(x, axes) for x, _ in inputs)))


def whole(*shape: int | None) -> pl.BlockSpec:
    """A whole array, except that the grid chooses one entry of each leading axis that is None: of the first by the
    grid's last axis, of the second by the last but one.

    >>> whole(None, None, 8, 8).index_map(5, 2, 1)  # a grid of (rows, heads, batch)
    (1, 2, 0, 0)
    """
    lead = sum(size is None for size in shape)

    def index(*place: Any) -> tuple:
        return (*place[::-1][:lead], *(0,) * (len(shape) - lead))

    return pl.BlockSpec(shape, index)


def padded(side: int) -> tuple[int, int]:
    """(rows, columns) of a square of blocks as kernels hold it: whole tiles, and a power of two for sorting."""
    return -(-side // TILE) * TILE, max(pl.next_power_of_2(side), TILE)


def pad(blocks: Float[Array, "B H rows n"]) -> Float[Array, "B H m width"]:
    """Pad rows of blocks with zeros to the size that kernels hold."""
    rows, n = blocks.shape[2:]
    return jnp.pad(blocks, ((0, 0), (0, 0), (0, padded(rows)[0] - rows), (0, padded(n)[1] - n)))


def iota(n: int) -> Array:
    return lax.iota(jnp.int32, n)
