"""How a kernel is started: operands padded for the copy engine, shared memory, and parameters for Mosaic GPU."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir


def pad_to(x: Array, multiple: int, axis: int) -> Array:
    """Zeros at the end of an axis, up to the next multiple."""
    return pad(x, axis, x.shape[axis] + -x.shape[axis] % multiple)


def pad(x: Array, axis: int, size: int, value: float = 0) -> Array:
    if x.shape[axis] == size:
        return x
    return jnp.pad(x, [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)], constant_values=value)


def vectors(size: int, **named: Array | None) -> dict[str, Array]:
    return {name: pad(x, 1, size) for name, x in named.items() if x is not None}


def pad_bias(bias: Array, rows: int, cols: int) -> Array:
    bias = bias if bias.shape[2] == 1 else pad(bias, 2, rows)
    return bias if bias.shape[3] == 1 else pad(bias, 3, cols)


def smem_bytes(shared: list[Any]) -> int:
    """Bytes of shared memory of scratch types: a buffer begins at a multiple of 1024 bytes, and barriers take 1024."""
    types = jax.tree.leaves(shared, is_leaf=lambda x: hasattr(x, "dtype"))
    sizes = [math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in types if not isinstance(x, plgpu.Barrier)]
    return sum(pl.cdiv(size, 1024) * 1024 for size in sizes) + 1024


def name_module(name: str) -> None:
    """Called in a kernel: names its module, which JAX before 0.12 numbers in the order of lowering instead. The name is
    in the key of the persistent compilation cache, so that a program was found only if all before it were the same."""
    if jax.__version_info__ >= (0, 12):
        return

    @plgpu.inline_mgpu()
    def set_name(_: Any) -> None:
        op = ir.InsertionPoint.current.block.owner
        while (above := op.operation.parent) is not None:
            op = above
        op.operation.attributes["mosaic_gpu.dump_basename"] = ir.StringAttr.get(name)

    set_name()


def run_kernel(
    kernel: Callable[..., None],
    name: str,
    ctas: int,
    compute_wgs: int,
    given: NamedTuple,
    results: NamedTuple,
    shared: list[Any],
    interpret: Any,
) -> Any:
    """`results` as arrays, in their named tuple, of `kernel(given, results, *shared)`, which gets refs."""

    def of_refs(given: Any, *refs: Any) -> None:
        if not interpret:
            name_module(name)
        count = len(results._fields)
        kernel(given, type(results)(*refs[:count]), *refs[count:])

    found = plgpu.kernel(
        of_refs,
        out_type=results,
        scratch_types=shared,
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=compute_wgs + 1,
        thread_name="wg",
        kernel_name=name,
        interpret=interpret,
        # No automatic barriers are needed: where a warpgroup both writes and reads a buffer by ordinary accesses
        # (`work.turns`), there is a barrier between.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,  # the numbers of a row are in one warp
        ),
    )(given)
    return type(results)(*found)
