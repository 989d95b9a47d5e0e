"""Sums that are the same in every order: sums of integers, with a unit per row and channel of dQ.

Floating-point sums depend on their order, integer sums do not. An element of dQ is a sum over keys, and its bound is
known before the sum:

    |sum_j dS_ij K_jd| <= sum_j P_ij |dP_ij - delta_i| |K_jd| <= (|dO_i| max_j |V_j| + |delta_i|) max_j |K_jd|

The unit is this bound over 2**30, so that the sum fits in 32 bits with a factor of two to spare. On random data, the
gradients are about 2**13 times smaller than the bound: the unit is still far below the precision of bfloat16.

A summand is mostly below 2**22 units. Then x + 1.5 * 2**23 is a float whose last bits are the nearest integer, and its
first bits are always the same: it is added up as it is, and what the first bits add is taken off the sum. Hopper adds
eight such floats in the time in which it converts one.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from xsake.kernels_pallas_gpu import mosaic_common as common

Array = jax.Array

_STEPS = 2.0**30
_SHIFT = 1.5 * 2.0**23
_SHIFT_BITS = 0x4B400000  # of _SHIFT as a float32


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

    def value(self, sums: Array, summands: Array) -> Array:
        """f32[B, T, H, D]: the gradient that sums of so many (i32[B, T, H]) `summands` stand for."""
        channels = jnp.repeat(self.channels, sums.shape[2] // self.channels.shape[1], axis=1)
        integers = sums - (summands * jnp.int32(_SHIFT_BITS))[..., None]  # modulo 2**32
        return integers.astype(jnp.float32) * self.rows.transpose(0, 2, 1)[..., None] * channels[:, None]


def to_summands(x: Array, *, interpret: bool) -> Array:
    """A float32 tile in the accumulator layout as integers to be added up: the nearest ones, and _SHIFT_BITS more."""
    if interpret:
        return jnp.round(x).astype(jnp.int32) + jnp.int32(_SHIFT_BITS)
    shifted = x + jnp.float32(_SHIFT)
    bits = lax.bitcast_convert_type(shifted, jnp.int32)
    return lax.fori_loop(0, _exceeds(bits), lambda _, bits: _converted(bits), bits)


_TILE = plgpu.Layout.WGMMA


def _exceeds(bits: Array) -> Array:
    """1 if the thread's warp has a number whose first bits are not those of _SHIFT, else 0."""

    @plgpu.inline_mgpu(arg_types=(_TILE,), return_type=common.VOTE)
    def vote(_: Any, tile: Any) -> Any:
        arith = mgpu_utils.arith
        differing = mgpu_utils.c(0, _i32())
        for pair in tile.registers.flat:
            for x in _halves(pair):
                differing = arith.ori(differing, arith.xori(x, mgpu_utils.c(_SHIFT_BITS, _i32())))
        return common.any_in_warp(arith.cmpi(arith.CmpIPredicate.uge, differing, mgpu_utils.c(1 << 23, _i32())))

    return vote(bits)


def _converted(bits: Array) -> Array:
    """The same integers, by an instruction that knows large ones."""

    @plgpu.inline_mgpu(arg_types=(_TILE,), return_type=plgpu.ShapeDtypeStruct(bits.shape, jnp.int32, layout=_TILE))
    def convert(_: Any, tile: Any) -> Any:
        text = "{.reg .f32 x; .reg .s32 n; mov.b32 x, $1; sub.f32 x, x, 0f4B400000; "
        text += f"cvt.rni.s32.f32 n, x; add.s32 $0, n, {_SHIFT_BITS};}}"
        registers = np.empty(tile.registers.shape, dtype=object)
        for i, pair in enumerate(tile.registers.flat):
            found = [mgpu_utils.inline_ptx(text, x, result_types=_i32()) for x in _halves(pair)]
            registers.flat[i] = vector.from_elements(pair.type, found)
        return mgpu.FragmentedArray(_registers=registers, _layout=tile.layout, _is_signed=True)

    return convert(bits)


def _halves(pair: Any) -> list[Any]:
    return [vector.extract(pair, dynamic_position=[], static_position=[i]) for i in range(2)]


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _norms(x: Array) -> Array:
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1))


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))
