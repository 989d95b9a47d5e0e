"""What the Mosaic GPU forward and backward kernels share.

    RowLists             the block lists of one direction (rows for forward and dQ, columns for dK/dV)
    ListRefs             `RowLists` as kernel refs; `.row(b, h, i)` -> (begin, full_end, end), clamped to capacity
    list_coords          which (batch, head) of the lists serves a query head
    add_columns          sums of every n-th column of a tile, one operation for the layout solver
    soft_cap_tanh        tanh(x / cap): the capped logit is cap * t, its derivative 1 - t * t
    matmul, matmul_add   a @ b and acc + a @ b on the tensor core, or by `lax.dot_general` when interpreted
    swizzled             a bf16/f16 tile buffer in swizzled shared memory
    col_vector           load a 1-D shared-memory vector as a per-column operand of a WGMMA tile
    per_row, per_col     broadcast a vector along the tile's rows or columns to the tile
    pad_to               zero-pad one axis of a small array so that its rows are legal for TMA

Tiles are [rows, columns] of a WGMMA accumulator: queries are rows in forward and dQ, columns in dK/dV.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
# The running maximum of a row starts here. From -inf, a row with no element yet would compute -inf - -inf.
LOWEST = -1e38


class RowLists(NamedTuple):
    """`indices` i32[b, h, N], `row_ptr` i32[b, h, n + 1], `num_full` i32[b, h, n], `order` i32[b, h, n] or None."""

    indices: jax.Array
    row_ptr: jax.Array
    num_full: jax.Array
    order: jax.Array | None = None


class ListRefs(NamedTuple):
    """The arrays of `RowLists` as refs to global memory, inside a kernel; `order` may be None."""

    indices: Any
    row_ptr: Any
    num_full: Any
    order: Any = None

    def row(self, batch: Any, head: Any, row: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(begin, full_end, end) of a row in `indices`; clamped, since the row pointers of a mask that overflowed its
        capacity point past the end.
        """
        capacity = jnp.int32(self.indices.shape[-1])
        begin = lax.min(self.row_ptr[batch, head, row], capacity)
        end = lax.min(self.row_ptr[batch, head, row + 1], capacity)
        full_end = lax.min(begin + self.num_full[batch, head, row], end)
        return begin, full_end, end

    def ranked(self, batch: Any, head: Any, rank: Any) -> jax.Array:
        """The row that is number `rank` by length, longest first."""
        return rank if self.order is None else self.order[batch, head, rank]


def list_coords(lists: Any, batch: Any, head: Any, *, num_q_heads: int, num_kv_heads: int) -> tuple[Any, Any]:
    """(batch, head) of the list that serves query head `head`. There is one list per batch entry or one for all, and
    one per query head, per KV head or for all heads.
    """
    list_batch, list_heads = lists.indices.shape[:2]
    if list_heads not in (1, num_kv_heads, num_q_heads):
        raise ValueError(f"{list_heads=} must be 1, {num_kv_heads=} or {num_q_heads=}")
    b = jnp.int32(0) if list_batch == 1 else batch
    if list_heads == 1:
        return b, jnp.int32(0)
    if list_heads == num_q_heads:
        return b, head
    return b, lax.div(head, jnp.int32(num_q_heads // num_kv_heads))


def col_vector(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0))


def per_row(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    return lax.broadcast_in_dim(x, tuple(shape), [0])


def per_col(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    return lax.broadcast_in_dim(x, tuple(shape), [1])


def wgmma_full(shape: Sequence[int], value: float) -> jax.Array:
    """A float32 constant in the accumulator layout: [m, n], or [m] as a row vector."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(tuple(shape), value, jnp.float32), layout)


def soft_cap_tanh(x: jax.Array, cap: float) -> jax.Array:
    """tanh(x / cap) by exp2, with an absolute error of at most 1e-7: tanh.approx has a relative error of 5e-4."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * jnp.float32(2.0 * LOG2E / cap)))


def _operand(x: Any) -> jax.Array:
    is_ref = hasattr(x, "transforms") or "Ref" in type(jax.typeof(x)).__name__
    return x[...] if is_ref else x


def matmul(
    a: Any,
    b: Any,
    *,
    interpret: bool,
    transpose_b: bool = False,
    overlap: Callable[[], None] | None = None,
) -> jax.Array:
    """a @ b in float32; `a` is in registers or shared memory, `b` in shared memory.

    `overlap` is called after the tensor core has been given the product and before its result is awaited.
    """
    if interpret:
        out = _dot(_operand(a), _operand(b).T if transpose_b else _operand(b))
        if overlap is not None:
            overlap()
        return out
    rhs = b.transpose((1, 0)) if transpose_b else b

    def compute(acc_ref: Any) -> jax.Array:
        plgpu.wgmma(acc_ref, a, rhs)
        if overlap is not None:
            overlap()
        return acc_ref[...]

    return pl.run_scoped(compute, plgpu.ACC((a.shape[0], rhs.shape[1]), jnp.float32))


def matmul_add(
    acc: jax.Array,
    a: Any,
    b: Any,
    *,
    interpret: bool,
    overlap: Callable[[], None] | None = None,
) -> jax.Array:
    """acc + a @ b; everything else as in `matmul`."""
    if interpret:
        out = acc + _dot(_operand(a), _operand(b))
        if overlap is not None:
            overlap()
        return out

    def compute(acc_ref: Any) -> None:
        plgpu.wgmma(acc_ref, a, b)
        if overlap is not None:
            overlap()

    return pl.run_state(compute)(plgpu.ACC.init(acc))


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def differs_in_warp(alpha: jax.Array, *, interpret: bool) -> jax.Array:
    """1 where a row of the thread's warp has a number other than 1, else 0: warps of a warpgroup may differ."""
    if interpret:
        return (alpha != 1.0).any().astype(jnp.int32)
    return _compared_in_warp(alpha, mgpu_utils.arith.CmpFPredicate.UNE, 1.0)


def exceeds_in_warp(x: jax.Array, limit: float, *, interpret: bool) -> jax.Array:
    """1 where the thread's warp has a number above the limit, else 0; NaN is not above it."""
    if interpret:
        return (x > limit).any().astype(jnp.int32)
    return _compared_in_warp(x, mgpu_utils.arith.CmpFPredicate.OGT, limit)


def _compared_in_warp(x: jax.Array, predicate: Any, limit: float) -> jax.Array:
    layout = plgpu.Layout.WGMMA if x.ndim == 2 else plgpu.Layout.WGMMA.reduce(1)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=VOTE)
    def vote(_: Any, x: Any) -> Any:
        arith, found = mgpu_utils.arith, None
        for register in x.registers.flat:
            for i in range(ir.VectorType(register.type).shape[0]):
                number = mgpu_utils.vector.extract(register, [], [i])
                bound = arith.constant(number.type, ir.FloatAttr.get(number.type, limit))
                test = arith.cmpf(predicate, number, bound)
                found = test if found is None else arith.ori(found, test)
        return any_in_warp(found)

    return vote(x)


VOTE = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)


def any_in_warp(found: Any) -> Any:
    """A VOTE, inside `inline_mgpu`: 1 where the condition holds for some thread of the warp, else 0."""
    i32 = ir.IntegerType.get_signless(32)
    found = mgpu_utils.nvvm.vote_sync(mgpu_utils.c(0xFFFFFFFF, i32), found, "any")
    return mgpu.FragmentedArray.splat(mgpu_utils.arith.extui(i32, found), (), is_signed=True)


def add_columns(sums: jax.Array, x: jax.Array, *, interpret: bool) -> jax.Array:
    """sums + x[:, :n] + x[:, n : 2 * n] + ..., added in this order, where `sums` has n columns."""

    def added(sums: Any, x: Any) -> Any:
        width = sums.shape[1]
        for column in range(0, x.shape[1], width):
            sums += x[:, column : column + width]
        return sums

    if interpret:
        return added(sums, x)
    wgmma = plgpu.Layout.WGMMA

    # One operation, because the layout solver takes time for every slice of x times every array of the same layout.
    @plgpu.inline_mgpu(
        arg_types=(wgmma, wgmma), return_type=plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, layout=wgmma)
    )
    def add(_: Any, sums: Any, x: Any) -> Any:
        return added(sums, x)

    return add(sums, x)


def take_ticket(counter: Any) -> jax.Array:
    """Adds one to a counter in global memory. Returns the old value, in one thread of the warpgroup only: `tell_ticket`
    writes it for the others. No thread waits for the value before it uses it.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    )
    def fetch_and_add(_: Any, counter: Any) -> Any:
        ticket = mgpu_utils.inline_ptx(
            "{.reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0; mov.b32 $0, 0; "
            "@p atom.relaxed.gpu.global.add.u32 $0, [$1], 1;}",
            mgpu_utils.memref_ptr(counter),
            result_types=ir.IntegerType.get_signless(32),
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(ticket, (), is_signed=True)

    return fetch_and_add(counter)


def tell_ticket(ticket: jax.Array, slot: Any) -> None:
    """Writes the ticket to shared memory, where other threads may read it after a barrier."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, plgpu.RefType()))
    def store(_: Any, ticket: Any, slot: Any) -> None:
        mgpu_utils.inline_ptx(
            "{.reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0; "
            "@p st.shared.u32 [$0], $1;}",
            mgpu_utils.memref_ptr(slot),
            ticket.registers.item(),
        )

    store(ticket, slot)


def swizzled(shape: Sequence[int], dtype: Any, widest: int = 64) -> Any:
    """Shared memory for 16-bit tiles [..., rows, columns] in the layout that wgmma reads; columns % 32 == 0.

    `widest`: columns at most that are laid out together, 64 or 32. Slices have a multiple of them, and both operands of
    a product that are in shared memory have the same number.
    """
    columns = 64 if shape[-1] % 64 == 0 and widest >= 64 else 32
    transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns)
    return plgpu.SMEM(tuple(shape), dtype, transforms=transforms)


def pad_to(x: jax.Array, multiple: int, axis: int = -1) -> jax.Array:
    """Zeros at the end of an axis, up to the next multiple."""
    axis %= x.ndim
    extra = -x.shape[axis] % multiple
    if not extra:
        return x
    return jnp.pad(x, [(0, extra if i == axis else 0) for i in range(x.ndim)])
