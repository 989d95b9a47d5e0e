"""Products on the tensor core: operands in shared memory, accumulators in registers.

The forward gets products as values (`matmul`, `matmul_add`). The gradients start several products at a time, each on an
accumulator of its own (`with_zeros` and `with_values` make them, `mma` adds to one, `read` waits for it). Interpreted,
accumulators are float32 buffers in shared memory, because interpreted wgmma does not read registers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def swizzled(shape: Sequence[int], dtype: Any, widest: int = 64) -> Any:
    """Shared memory for 16-bit tiles [..., rows, columns] in the layout that wgmma reads; columns % 32 == 0.

    `widest`: the most columns that are laid out together, 64 or 32. A slice has a multiple of so many columns, and both
    operands of a product in shared memory lay out the same number together.
    """
    columns = 64 if shape[-1] % 64 == 0 and widest >= 64 else 32
    transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns)
    return plgpu.SMEM(tuple(shape), dtype, transforms=transforms)


def wgmma_full(shape: Sequence[int], value: float) -> Array:
    """A float32 constant in the accumulator layout: [m, n], or [m] as a row vector."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(tuple(shape), value, jnp.float32), layout)


def matmul(
    a: Any,
    b: Any,
    *,
    interpret: bool,
    transpose_b: bool = False,
    overlap: Callable[[], None] | None = None,
) -> Array:
    """a @ b in float32; `a` is in registers or shared memory, `b` in shared memory.

    `overlap` is called after the tensor core has been given the product and before its result is awaited.
    """
    if interpret:
        out = _dot(_operand(a), _operand(b).T if transpose_b else _operand(b))
        if overlap is not None:
            overlap()
        return out
    rhs = b.transpose((1, 0)) if transpose_b else b

    def compute(acc_ref: Any) -> Array:
        plgpu.wgmma(acc_ref, a, rhs)
        if overlap is not None:
            overlap()
        return acc_ref[...]

    return pl.run_scoped(compute, plgpu.ACC((a.shape[0], rhs.shape[1]), jnp.float32))


def matmul_add(
    acc: Array,
    a: Any,
    b: Any,
    *,
    interpret: bool,
    overlap: Callable[[], None] | None = None,
) -> Array:
    """acc + a @ b, otherwise as `matmul`."""
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


def _dot(a: Array, b: Array) -> Array:
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _operand(x: Any) -> Array:
    is_ref = hasattr(x, "transforms") or "Ref" in type(jax.typeof(x)).__name__
    return x[...] if is_ref else x


def with_zeros(body: Any, buffers: list[Any], shapes: list[tuple[int, int]], *, interpret: bool) -> Any:
    if not interpret:
        return pl.run_scoped(body, *[plgpu.ACC(shape, jnp.float32) for shape in shapes])
    for buffer in buffers:
        buffer[...] = jnp.zeros(buffer.shape, jnp.float32)
    return body(*buffers)


def with_values(body: Any, buffers: list[Any], values: list[Array], *, interpret: bool) -> None:
    """Runs `body(*accumulators)`, and waits for every product that the body started."""
    if not interpret:
        pl.run_state(lambda refs: body(*refs))(tuple(plgpu.ACC.init(value) for value in values))
        return
    for buffer, value in zip(buffers, values, strict=True):
        buffer[...] = value
    body(*buffers)


def mma(acc: Any, a: Any, b: Any, *, transpose_a: bool = False, transpose_b: bool = False, interpret: bool) -> None:
    if not interpret:
        plgpu.wgmma(acc, a.transpose((1, 0)) if transpose_a else a, b.transpose((1, 0)) if transpose_b else b)
        return
    a, b = a[...].T if transpose_a else a[...], b[...].T if transpose_b else b[...]
    acc[...] = acc[...] + _dot(a, b)


def read(acc: Any, *, in_flight: int, interpret: bool) -> Array:
    return acc[...] if interpret else plgpu.wgmma_accumulator_load(acc, wait_n=in_flight)


def opaque(x: Array, *, interpret: bool) -> Array:
    """The same value, hidden from the compiler. Otherwise it would move computations on the value out of the loop, and
    keep the results in registers.
    """
    return x if interpret else lax.optimization_barrier(x)


def release(barrier: Any, *, interpret: bool) -> None:
    if interpret:
        plgpu.commit_smem()  # interpreted products read shared memory by ordinary loads
    plgpu.barrier_arrive(barrier)
