"""Sums that are the same in every order: sums of integers, with a unit per row and channel of dQ.

Floating-point sums depend on their order, integer sums do not. An element of dQ is a sum over keys, and its bound is
known before the sum:

    |sum_j dS_ij K_jd| <= sum_j P_ij |dP_ij - delta_i| |K_jd| <= (|dO_i| max_j |V_j| + |delta_i|) max_j |K_jd|

The unit is this bound over 2**30, so that the sum fits in 32 bits with a factor of two to spare. On random data, the
gradients are about 2**13 times smaller than the bound: the unit is still far below the precision of bfloat16.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

Array = jax.Array

_STEPS = 2.0**30


class Units(NamedTuple):
    """gradient = integer * `rows` * `channels`. `rows` is NaN where the gradient is NaN, 0 where a query has no keys.

    The maxima leave out keys and values that are not finite. A query that attends to one of them has a `delta` that is
    not finite, and so a unit that is not finite; if no query attends to them, they must not matter.
    """

    rows: Array  # f32[B, H, T]
    channels: Array  # f32[B, K, D]

    @classmethod
    def of_dq(cls, key: Array, value: Array, d_out: Array, lse: Array, delta: Array) -> "Units":
        most_value = jnp.repeat(jnp.max(_finite(_norms(value)), axis=1), d_out.shape[2] // key.shape[2], axis=1)
        rows = _norms(d_out).transpose(0, 2, 1) * most_value[:, :, None] + jnp.abs(delta)
        channels = jnp.max(_finite(jnp.abs(key)), axis=1).astype(jnp.float32)
        return cls(jnp.where(lse == -jnp.inf, 0.0, rows * jnp.float32(1.0 / _STEPS)), channels)

    def steps(self) -> "Units":
        """1 / unit, the factors that turn numbers into integers; 0 where the unit is 0 or NaN."""
        return Units(*(jnp.where(x > 0, 1.0 / x, 0.0) for x in self))

    def value(self, sums: Array) -> Array:
        """f32[B, T, H, D]: the gradient that integer sums stand for."""
        channels = jnp.repeat(self.channels, sums.shape[2] // self.channels.shape[1], axis=1)
        return sums.astype(jnp.float32) * self.rows.transpose(0, 2, 1)[..., None] * channels[:, None]


def to_integers(x: Array, *, interpret: bool) -> Array:
    """A float32 tile in the accumulator layout, rounded to the nearest integers."""
    if interpret:
        return jnp.round(x).astype(jnp.int32)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.int32, layout=plgpu.Layout.WGMMA),
    )
    def convert(_: Any, tile: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)

        def nearest(pair: Any) -> Any:
            halves = [vector.extract(pair, dynamic_position=[], static_position=[i]) for i in range(2)]
            halves = [mgpu_utils.inline_ptx("cvt.rni.s32.f32 $0, $1;", x, result_types=i32) for x in halves]
            return vector.from_elements(ir.VectorType.get((2,), i32), halves)

        registers = np.array([nearest(pair) for pair in tile.registers.flat], dtype=object)
        return mgpu.FragmentedArray(
            _registers=registers.reshape(tile.registers.shape), _layout=tile.layout, _is_signed=True
        )

    return convert(x)


def _norms(x: Array) -> Array:
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1))


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))
