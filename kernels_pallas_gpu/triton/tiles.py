"""What the Triton kernels share: the call cut into tiles, the walk over the lists, masked loads, logits.

Three rules of this lowering shape the code. Every array in a kernel has power-of-two sizes. There is no scalar
prefetch, so that the lists are inputs as a whole and read in the kernel. The device does not clamp an index, so that
every load that can pass the end of an array is masked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from xsake._ground.fields import check_fields, one_of, whole
from xsake._ground.trace import interpreting, varying_axes
from xsake.backend.contract import Call

LOG2_E = math.log2(math.e)
NEG_INF = float("-inf")

Refs = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """How one kernel is tiled.

    Args:
      q, kv: rows and columns of a tile; they must divide the mask's block.
      num_warps: warps per program.
      num_stages: depth of the pipeline.
    """

    q: int = one_of(16, 32, 64, 128, 256)
    kv: int = one_of(16, 32, 64, 128, 256)
    num_warps: int = one_of(1, 2, 4, 8, 16)
    num_stages: int = whole(1, 8)

    def __post_init__(self) -> None:
        check_fields(self)


class Units(NamedTuple):
    """The unit of logits: a natural logit x is x * one here. exp(x) is units.exp(x * one), and log its inverse."""

    one: float
    exp: Callable[[Array], Array]
    log: Callable[[Array], Array]


def units_of(dtype: Any) -> Units:
    """Base 2 for 16-bit inputs: scale, change of base and subtraction of the peak are one instruction before exp2.

    Natural logits for float32: the factor for exp2 comes after the subtraction of the peak. A factor before it would
    round logit and lse once more, which shows in the weights of logits of 4000.
    """
    if dtype == jnp.float32:
        return Units(1.0, lambda x: jnp.exp2(x * LOG2_E), jnp.log)
    return Units(LOG2_E, jnp.exp2, jnp.log2)


def padded_dim(dim: int) -> int:
    """The size in a kernel of a head dimension: a power of two, at least 16."""
    return max(16, pl.next_power_of_2(dim))


def queries(call: Call) -> Array:
    """The queries as the kernels take them: multiplied by the scale where `product_scale` is 1."""
    return call.query * call.scale if _scaled_first(call) else call.query


def _scaled_first(call: Call) -> bool:
    """Whether the queries are scaled, and not the products. In float32 that saves a rounding of the logits; 16-bit
    queries would lose more by it.
    """
    return call.query.dtype == jnp.float32


class Tiles:
    """The static facts of a call under one tiling, and the pieces of a kernel that follow from them."""

    def __init__(self, call: Call, tiling: Tiling):
        mask = call.mask
        if mask.block_q % tiling.q or mask.block_kv % tiling.kv:
            raise ValueError(
                f"tile {tiling.q} x {tiling.kv} must divide the mask's block {mask.block_q} x {mask.block_kv}"
            )
        self.tiling, self.tq, self.tkv = tiling, tiling.q, tiling.kv
        self.split_q, self.split_kv = mask.block_q // tiling.q, mask.block_kv // tiling.kv
        self.num_q, self.num_kv = mask.num_q_blocks * self.split_q, mask.num_kv_blocks * self.split_kv
        self.batch, self.q_heads, self.kv_heads = call.batch, call.q_heads, call.kv_heads
        self.group = call.q_heads // call.kv_heads
        self.q_len, self.kv_len, self.head_dim, self.value_dim = call.q_len, call.kv_len, call.head_dim, call.value_dim
        self.capacity, self.mask_heads, self.mask_batch = mask.capacity, mask.heads, mask.batch
        self.q_tail, self.kv_tail = call.q_len % mask.block_q != 0, call.kv_len % mask.block_kv != 0
        self.band, self.scale, self.soft_cap = call.band, call.scale, call.soft_cap
        self.units = units_of(call.query.dtype)
        self.product_scale = 1.0 if _scaled_first(call) else self.scale
        self.has_segments = call.q_segments is not None
        self.has_positions = call.q_positions is not None
        self.full_is_exact = call.full_is_exact
        self.bias_shape = None if call.bias is None else call.bias.shape
        self.block_q, self.block_kv = mask.block_q, mask.block_kv
        self.bitmaps = None if mask.bitmaps is None else mask.bitmaps.shape
        self.axes = varying_axes(call)
        self.page, self.num_pages = call.page, call.key.shape[0]
        if self.page is not None and self.page % self.tkv:
            raise ValueError(f"a tile of {self.tkv} keys must divide the page of {self.page} keys")

    # -- calling --------------------------------------------------------------------------------------------------

    def run(self, kernel: Callable, name: str, grid: tuple, inputs: dict, outputs: dict) -> dict[str, Array]:
        """Runs kernel(refs, outs); `inputs` maps a name to (array, spec) and `outputs` to (shape, dtype, spec)."""
        varying = jax.sharding.ManualAxisType(varying=self.axes)
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[{n: spec for n, (_, spec) in inputs.items()}],
            out_specs={n: spec for n, (_, _, spec) in outputs.items()},
            out_shape={n: jax.ShapeDtypeStruct(s, t, manual_axis_type=varying) for n, (s, t, _) in outputs.items()},
            compiler_params=plgpu.CompilerParams(num_warps=self.tiling.num_warps, num_stages=self.tiling.num_stages),
            interpret=interpreting(),
            name=name,
        )({n: x for n, (x, _) in inputs.items()})

    # -- the walk over a list -------------------------------------------------------------------------------------

    def walk(
        self, indices: Callable, split: int, tile: int, start: Array, stop: Array, body: Callable, carry: Any
    ) -> Any:
        """Calls body(first token of the tile, its slot, carry) for every tile of the list slots [start, stop)."""

        def at(step: Array) -> Array:
            # Slots are read one step ahead, which hides the latency; the minimum is for the last step.
            return indices(jnp.minimum(int_div(step, split), self.capacity - 1))

        def step(n: Array, state: tuple) -> tuple:
            block, carry = state
            after = at(n + 1)
            tile_number = block if split == 1 else block * split + lax.rem(n, jnp.int32(split))
            return after, body(tile_number * tile, int_div(n, split), carry)

        first, last = start * split, stop * split
        return lax.fori_loop(first, last, step, (at(first), carry))[1]

    def walk_row(
        self, bounds: tuple, indices: Callable, split: int, tile: int, trivial: bool, body: Callable, carry: Any
    ) -> Any:
        """Walks full blocks without the element test, then the others with it. `trivial`: no element can fail it."""
        start, full, stop = bounds
        if trivial:
            return self.walk(indices, split, tile, start, stop, body(False), carry)
        if self.full_is_exact:
            carry = self.walk(indices, split, tile, start, full, body(False), carry)
            start = full
        return self.walk(indices, split, tile, start, stop, body(True), carry)

    def bounds(self, row_ptr: Callable, num_full: Callable, row: Array, inside: Array) -> tuple[Array, Array, Array]:
        """Slots (start, end of full blocks, end) of a row; start = end where not `inside`.

        Clamped, since the row pointers of a mask that overflowed its capacity point past the end.
        """
        start = jnp.minimum(row_ptr(row), self.capacity)
        stop = jnp.where(inside, jnp.minimum(row_ptr(row + 1), self.capacity), start)
        return start, jnp.minimum(start + num_full(row), stop), stop

    @property
    def untested(self) -> bool:
        """Whether no rule excludes an element; the ends of the sequences may."""
        return self.band == (None, None) and not self.has_segments and self.bitmaps is None

    # -- loads ----------------------------------------------------------------------------------------------------

    def load(
        self, ref: Any, first: Array, rows: int, length: int | None, dim: int, *, but: Array | None = None
    ) -> Array:
        """[rows, padded dim] from `first` on; 0 past `length` (None: the tile is known to be inside) and past `dim`.

        `but`: bool[rows], rows that are 0 too.
        """
        width = padded_dim(dim)
        mask = None
        if length is not None:
            mask = jnp.broadcast_to((first + iota(rows) < length)[:, None], (rows, width))
        if but is not None:
            mask = _both(mask, jnp.broadcast_to(~but[:, None], (rows, width)))
        if width != dim:
            columns = jnp.broadcast_to((iota(width) < dim)[None, :], (rows, width))
            mask = columns if mask is None else mask & columns
        return plgpu.load(ref, mask=mask, other=None if mask is None else 0.0)

    def place(self, refs: Refs, first_kv: Array) -> Array:
        """Where the tile from key `first_kv` on begins, among the keys of its sequence or of all pages."""
        if self.page is None:
            return first_kv
        number = lax.div(first_kv, jnp.int32(self.page))
        # The last block may end past the last page, and a page of padding may be any: nothing of either counts.
        page = refs["page_table"][jnp.minimum(number, self.kv_len // self.page - 1)]
        return jnp.clip(page, 0, self.num_pages - 1) * self.page + (first_kv - number * self.page)

    def padding(self, refs: Refs, first_kv: Array) -> Array | None:
        """bool[tkv]: values that may be NaN. A weight of 0 times NaN would be NaN; without pages there is none."""
        if self.page is None or not self.has_segments:
            return None
        here = refs["kv_segments"].at[pl.ds(first_kv, self.tkv)]
        return self.tokens(here, first_kv, self.tkv, self.kv_len, -2) < 0

    def tokens(self, ref: Any, first: Array, count: int, length: int, other: Any) -> Array:
        """One value per token, [count]; `other` past the end."""
        return plgpu.load(ref, mask=first + iota(count) < length, other=other)

    def bias_tile(self, at: Callable, first_q: Array, first_kv: Array, masked: bool) -> Array:
        """A tile's bias in float32, [tq, tkv] or a shape that broadcasts to it; `at(row, column)` indexes the bias."""
        one_q, one_kv = self.bias_shape[2] == 1, self.bias_shape[3] == 1
        if one_q and one_kv:
            return plgpu.load(at(zero(first_q), zero(first_q))).astype(jnp.float32)
        if one_q:
            row = self.tokens(at(zero(first_q), pl.ds(first_kv, self.tkv)), first_kv, self.tkv, self.kv_len, 0.0)
            return row.astype(jnp.float32)[None, :]
        if one_kv:
            column = self.tokens(at(pl.ds(first_q, self.tq), zero(first_q)), first_q, self.tq, self.q_len, 0.0)
            return column.astype(jnp.float32)[:, None]
        ref = at(pl.ds(first_q, self.tq), pl.ds(first_kv, self.tkv))
        if not masked:
            return plgpu.load(ref).astype(jnp.float32)
        inside = (first_q + iota(self.tq) < self.q_len)[:, None] & (first_kv + iota(self.tkv) < self.kv_len)[None, :]
        return plgpu.load(ref, mask=inside, other=0.0).astype(jnp.float32)

    # -- arithmetic -----------------------------------------------------------------------------------------------

    def logits(self, products: Array, bias: Array | None) -> tuple[Array, float, Array | None]:
        """(x, c, slope): x * c are logits in `units`, c > 0, and slope is the derivative of the soft cap.

        c contains the scale where the softmax follows the products at once.
        """
        if bias is None and self.soft_cap is None and self.product_scale > 0:
            return products, self.product_scale * self.units.one, None
        x, slope = products * self.product_scale, None
        if bias is not None:
            # Not a sum: Triton would turn dot + bias into a dot whose accumulator begins with the bias, and each of its
            # steps would round at the size of the bias.
            x = x - (-bias)
        if self.soft_cap is not None:
            t = jnp.tanh(x * (1 / self.soft_cap))
            x, slope = t * self.soft_cap, 1 - t * t
        return x, self.units.one, slope

    def attends(self, q: Token, kv: Token, bits: Array | None = None) -> Array:
        """The element rule; the arrays of one side are columns [n, 1], those of the other rows [1, n]."""
        ok = kv.index < self.kv_len if self.kv_tail else None
        if self.band != (None, None):
            allowed = self.band.allows_position if self.has_positions else lambda q, kv: self.band.allows(kv - q)
            ok = _both(ok, allowed(q.position, kv.position))
        if self.has_segments:
            ok = _both(ok, q.segment == kv.segment)
        return ok if bits is None else _both(ok, bits)

    def bits(self, at: Callable, first_q: Array, first_kv: Array, axis: int) -> Array:
        """The bits of a tile, queries along `axis`; `at(column, word)` indexes the bitmap of its block.

        Each word is loaded once and spread over its queries: a load per element would take registers for addresses.
        """

        def shaped(x: Array, along: int) -> Array:
            return x[:, None] if along == 0 else x[None, :]

        row = lax.rem(first_q, jnp.int32(self.block_q))
        column = lax.rem(first_kv, jnp.int32(self.block_kv)) + iota(self.tkv)
        if self.bitmaps[3] == 1:
            column = zero(column)
        count = max(1, self.tq // 32)
        shape = (count, self.tkv) if axis == 0 else (self.tkv, count)
        word = jnp.broadcast_to(shaped(lax.div(row, jnp.int32(32)) + iota(count), axis), shape)
        words = plgpu.load(at(jnp.broadcast_to(shaped(column, 1 - axis), shape), word))
        each = min(32, self.tq)
        spread = jnp.broadcast_to(
            lax.expand_dims(words, [axis + 1]), (count, each, self.tkv) if axis == 0 else (self.tkv, count, each)
        ).reshape((self.tq, self.tkv) if axis == 0 else (self.tkv, self.tq))
        place = shaped(lax.rem(row + iota(self.tq), jnp.int32(32)), axis)
        return (lax.shift_right_logical(spread, jnp.broadcast_to(place, spread.shape)) & 1) != 0

    def q_tokens(self, refs: Refs, first: Array, axis: int) -> Token:
        return self._tokens(refs, "q", first, self.tq, self.q_len, axis, -1)

    def kv_tokens(self, refs: Refs, first: Array, axis: int) -> Token:
        return self._tokens(refs, "kv", first, self.tkv, self.kv_len, axis, -2)

    def _tokens(self, refs: Refs, side: str, first: Array, count: int, length: int, axis: int, outside: int) -> Token:
        """Index, position and segment of a tile's tokens, along `axis`. Segment ids past the end of queries (-1) and of
        keys (-2) never agree.
        """
        here = (pl.ds(first, count),)

        def shaped(x: Array) -> Array:
            return x[:, None] if axis == 0 else x[None, :]

        index = first + iota(count)
        position, segment = index, None
        if f"{side}_positions" in refs:
            position = self.tokens(refs[f"{side}_positions"].at[here], first, count, length, 0)
        if self.has_segments:
            segment = shaped(self.tokens(refs[f"{side}_segments"].at[here], first, count, length, outside))
        return Token(shaped(index), shaped(position), segment)


@dataclasses.dataclass(frozen=True)
class Token:
    index: Array
    position: Array
    segment: Array | None


def _both(a: Array | None, b: Array) -> Array:
    return b if a is None else a & b


def iota(n: int) -> Array:
    return lax.iota(jnp.int32, n)


def dot(a: Array, b: Array, contract: tuple[int, int] = (1, 0)) -> Array:
    """The product in float32; float32 operands are multiplied as float32, not as TF32.

    A GPU adds float32 products one after another, so that any two kernels round the same logit alike. XLA on a CPU has
    another order for each shape; interpretation therefore adds in one fixed order.
    """
    if interpreting() and a.dtype == jnp.float32:
        return (jnp.moveaxis(a, contract[0], 0)[:, :, None] * jnp.moveaxis(b, contract[1], 0)[:, None, :]).sum(0)
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def int_div(a: Array, b: int) -> Array:
    return a if b == 1 else lax.div(a, jnp.int32(b))


def zero(like: Array) -> Array:
    """0 as a traced value: the interpreter does not accept a literal as the index of a masked load."""
    return like * 0


def repeat(count: int, body: Callable, carry: Any, like: Array) -> Any:
    """Calls body(n, carry) for n in range(count); n is traced also for count = 1, where JAX would unroll the loop."""
    return body(zero(like), carry) if count == 1 else lax.fori_loop(0, count, body, carry)
