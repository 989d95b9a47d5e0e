"""Sums that are the same in every order: sums of integers, with a unit per row and channel of dQ.

Floating-point sums depend on their order, integer sums do not. An element of dQ is a sum over keys, and its bound is
known before the sum:

    |sum_j dS_ij K_jd| <= sum_j P_ij |dP_ij - delta_i| |K_jd| <= (|dO_i| max_j |V_j| + |delta_i|) max_j |K_jd|

The unit is this bound divided by 2**28 to 2**30, so that the sum fits in 32 bits with a factor of two to spare: the
probabilities of large logits may sum to more than 1. On random data, the gradients are about 2**13 times smaller than
the bound: the unit is still far below the precision of bfloat16. A key or a value that is thousands of times larger
than all others, wherever it is in the sequence, makes the unit larger and the gradients less precise.

A step is 1 / unit. A row's step is a power of two, so that a bfloat16 dS times the step is not rounded. Then one
instruction multiplies a tile of dQ by the channels' steps and adds 3. A summand is mostly below 2**22 units: the result
is a float from 2 to 4, whose first bits are always the same and whose last bits are the nearest integer. Its bits are
added up as they are, and the sum of the first bits is subtracted at the end. Hopper does eight of these in the time in
which it converts one float.
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

Array = jax.Array

# |dS| times a row's step is at most 2 ** this. float16 holds all bits of small numbers only if the largest are large.
# In bfloat16, large numbers times large keys would exceed float32, and 2 bits suffice for all steps to be normal.
_ROW_BITS, _ROW_BITS_FLOAT16 = 2, 14
_BITS = 22  # the last bit of a float from 2 to 4 is 2 ** -22
_SHIFT_BITS = 0x40400000  # of 3 as a float32
# A channel's step is this times a power of two, so that no float times a step is -3: the sum 0 would pass for a float
# from 2 to 4 in the test of first bits.
_MANTISSA = 1.25


class Units(NamedTuple):
    """gradient = integer * `rows` * `channels`. `rows` is NaN where the gradient is NaN, and 0 where the gradient is 0.
    `channels` is NaN where a key is 2**125 or more.

    The maxima leave out keys and values that are not finite. A query that gives weight to one of them has a `delta`
    that is not finite, and so a unit that is not finite. In blocks that are not listed they do not matter. In a listed
    block, a key that is not finite and has weight 0 makes a sum of floats NaN; here the tile's summand counts as 0.
    """

    rows: Array  # f32[B, H, T]
    channels: Array  # f32[B, K, D]

    @classmethod
    def of_dq(cls, key: Array, value: Array, d_out: Array, lse: Array, delta: Array) -> "Units":
        most_value = jnp.repeat(jnp.max(_finite(_norms(value)), axis=1), d_out.shape[2] // key.shape[2], axis=1)
        rows = _norms(d_out).transpose(0, 2, 1) * most_value[:, :, None] + jnp.abs(delta)
        row_bits = _ROW_BITS_FLOAT16 if key.dtype == jnp.float16 else _ROW_BITS
        _, exponent = _mantissa_and_exponent(rows)
        unit = _power_of_two(jnp.maximum(exponent - row_bits, -124))  # so that the step, its inverse, is a float32
        unit = jnp.where(jnp.isfinite(rows), jnp.where(rows > 0, unit, 0.0), jnp.nan)
        most_key = jnp.max(_finite(jnp.abs(key)), axis=1).astype(jnp.float32)
        room = 2.0 ** (30 - _BITS - row_bits) / _MANTISSA
        mantissa, of_key = _mantissa_and_exponent(most_key)
        _, of_room = _mantissa_and_exponent(room / mantissa)
        exponent = jnp.minimum(of_room - of_key, 104)  # for which the unit is a normal number
        unit_of_step_1 = jnp.float32(2.0**-_BITS / _MANTISSA)
        channels = jnp.where(most_key > 0, unit_of_step_1 * _power_of_two(1 - exponent), 0.0)
        channels = jnp.where(of_key > 125, jnp.nan, channels)
        return cls(jnp.where(lse == -jnp.inf, 0.0, unit), channels)

    def steps(self) -> "Units":
        """1 / unit, the factors that turn numbers into integers; 0 where the unit is 0 or NaN. The steps of `channels`
        are 2**22 times smaller than that.
        """
        _, exponent = _mantissa_and_exponent(self.channels)
        channels = jnp.float32(_MANTISSA) * _power_of_two(-_BITS - exponent)
        return Units(jnp.where(self.rows > 0, 1.0 / self.rows, 0.0), jnp.where(self.channels > 0, channels, 0.0))

    def value(self, sums: Array, summands: Array) -> Array:
        """f32[B, T, H, D]: the gradient of integer `sums`. `summands` i32[B, T, H]: how many were added to each row."""
        channels = jnp.repeat(self.channels, sums.shape[2] // self.channels.shape[1], axis=1)
        integers = sums - (summands * jnp.int32(_SHIFT_BITS))[..., None]  # modulo 2**32
        rows, channels = self.rows.transpose(0, 2, 1)[..., None], channels[:, None]
        # The smaller unit first: an integer times the larger unit may exceed float32.
        product = integers.astype(jnp.float32) * jnp.minimum(rows, channels) * jnp.maximum(rows, channels)
        return jnp.where(rows == 0, 0.0, product)


# Not `jnp.frexp` and `jnp.ldexp`: beside refs, they do not trace in a `jax.shard_map` that checks varying axes.
def _mantissa_and_exponent(x: Array) -> tuple[Array, Array]:
    """x = mantissa * 2 ** exponent, the mantissa from 0.5 to 1; 0 and subnormals give those of a larger number."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type((bits & 0x7FFFFF) | 0x3F000000, jnp.float32), (bits >> 23) - 126


def _power_of_two(exponent: Array) -> Array:
    """2 ** exponent, if that is a normal float32."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def to_summands(x: Array, steps: Array, *, interpret: bool) -> Array:
    """round(x * steps * 2**22) + _SHIFT_BITS, for a float32 tile in the accumulator layout. The integers of large
    numbers are wrong until `correct` has mended them.
    """
    if interpret:
        return jnp.round(x * steps * 2.0**_BITS).astype(jnp.int32) + jnp.int32(_SHIFT_BITS)
    return _shifted(x, steps)


def correct(tile: Any, summands: Array) -> None:
    """Mends wrong integers in the tile of shared memory where `summands` was stored.

    Few tiles have any. Because the search comes after the store, it neither delays the store nor needs registers
    beside it.
    """

    def mend(_: Any, none: None) -> None:
        tile[...] = _converted(plgpu.load(tile, layout=_TILE))

    lax.fori_loop(0, _exceeds(summands), mend, None)


_TILE = plgpu.Layout.WGMMA
_VOTE = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)


def _shifted(x: Array, steps: Array) -> Array:
    """The bits of x * steps + 3, rounded once."""

    @plgpu.inline_mgpu(arg_types=(_TILE, _TILE), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.int32, layout=_TILE))
    def multiply(_: Any, x: Any, steps: Any) -> Any:
        text = "{.reg .f32 x; fma.rn.f32 x, $1, $2, 0f40400000; mov.b32 $0, x;}"
        return _mapped(text, x, steps)

    return multiply(x, steps)


def _exceeds(bits: Array) -> Array:
    """1 if the thread's warp has a number whose first bits are not the ones of a float from 2 to 4, else 0."""

    @plgpu.inline_mgpu(arg_types=(_TILE,), return_type=_VOTE)
    def vote(_: Any, tile: Any) -> Any:
        numbers = [half for pair in tile.registers.flat for half in _halves(pair)]
        text: list[str] = []
        seen = [f"${i + 1}" for i in range(len(numbers))]
        while len(seen) > 1:  # a tree: in a chain, every instruction would wait for the one before
            seen, triples = [], [(seen[i : i + 3] + 2 * ["0"])[:3] for i in range(0, len(seen), 3)]
            for triple in triples:
                seen.append(f"x{len(text)}")
                text.append(f".reg .b32 {seen[-1]}; lop3.b32 {seen[-1]}, {', '.join(triple)}, 0xFE;")
        text.append(f".reg .pred p; and.b32 {seen[0]}, {seen[0]}, 0xFF800000; setp.ne.b32 p, {seen[0]}, 0x40000000;")
        text.append("vote.sync.any.pred p, p, 0xFFFFFFFF; selp.b32 $0, 1, 0, p;")
        # Side effects keep the compiler from moving the store behind it.
        found = mgpu_utils.inline_ptx(
            "{" + " ".join(text) + "}", *numbers, result_types=_i32(), has_side_effects=True, convergent=True
        )
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return vote(bits)


def _converted(bits: Array) -> Array:
    """The same integers, by the instruction that converts floats, which is right for large ones too."""

    @plgpu.inline_mgpu(arg_types=(_TILE,), return_type=plgpu.ShapeDtypeStruct(bits.shape, jnp.int32, layout=_TILE))
    def convert(_: Any, tile: Any) -> Any:
        text = "{.reg .f32 x; .reg .s32 n; mov.b32 x, $1; sub.f32 x, x, 0f40400000; mul.f32 x, x, 0f4A800000; "
        return _mapped(text + f"cvt.rni.s32.f32 n, x; add.s32 $0, n, {_SHIFT_BITS};}}", tile)

    return convert(bits)


def _mapped(text: str, *tiles: Any) -> Any:
    """A tile of integers: the assembler `text` applied to the numbers of the tiles, element by element."""
    registers = np.empty(tiles[0].registers.shape, dtype=object)
    for i, pairs in enumerate(zip(*(tile.registers.flat for tile in tiles), strict=True)):
        numbers = zip(*map(_halves, pairs), strict=True)
        found = [mgpu_utils.inline_ptx(text, *xs, result_types=_i32()) for xs in numbers]
        registers.flat[i] = vector.from_elements(ir.VectorType.get((2,), _i32()), found)
    return mgpu.FragmentedArray(_registers=registers, _layout=tiles[0].layout, _is_signed=True)


def _halves(pair: Any) -> list[Any]:
    return [vector.extract(pair, dynamic_position=[], static_position=[i]) for i in range(2)]


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _norms(x: Array) -> Array:
    """Upper bounds of the norms: the norms, or where squares are not normal numbers up to sqrt(D) times as much."""
    x = x.astype(jnp.float32)
    most, squares = jnp.max(jnp.abs(x), axis=-1), jnp.sum(jnp.square(x), axis=-1)  # one pass
    bound = jnp.where(jnp.isfinite(most), jnp.minimum(most * x.shape[-1] ** 0.5, jnp.finfo(jnp.float32).max), most)
    return jnp.where((squares > 2.0**-100) & (squares < jnp.inf), jnp.sqrt(squares), bound)


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))
