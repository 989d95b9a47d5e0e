"""What the gradient kernels for Hopper share: rows of weights, products, loads, and how a kernel is started.

    P = exp(S - lse)    S = soft_cap(scale * Q K^T + bias), masked
    dS = P * (dO V^T - delta) * soft_cap'
    dQ = scale * dS K    dK = scale * dS^T Q    dV = P^T dO

dQ walks the row lists, dK/dV the transposed lists; there are no atomic sums but the fused kernel's. The rows that a
compute warpgroup holds are the M of every wgmma, so that P and dS are the left operands of the next product as they
come, in registers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS
from xsake.kernels_pallas_gpu.hopper.tile.common import LOG2E, soft_cap_tanh
from xsake.kernels_pallas_gpu.hopper.tile.conditions import when

Array = jax.Array

WGMMA = plgpu.Layout.WGMMA
ALONG_ROWS, ALONG_COLS = WGMMA.reduce(1), WGMMA.reduce(0)
PART = 64  # columns at a time of a tile with a mask, bias or soft cap: their values take registers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitRule:
    """How logits become probabilities; all of it known while tracing."""

    scale: float
    soft_cap: float | None
    has_bias: bool
    # Rows past the last query have no weight, but a bias of NaN for keys that they alone attend would reach dK.
    rows_share_bias: bool = False

    @property
    def folds_lse(self) -> bool:
        """Whether the accumulator of S starts at -lse / scale: then p = exp(scale * S), and lse takes no registers."""
        return not self.has_bias and self.soft_cap is None and self.scale > 0

    def row_statistic(self, lse: Array) -> Array:
        """-lse / scale where `folds_lse`, else lse * log2(e); of an empty row (lse = -inf), what makes p 0."""
        if self.folds_lse:
            return jnp.where(lse == -jnp.inf, -jnp.inf, lse * (-1.0 / self.scale))
        return jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)

    def attends_nothing(self, statistic: Array) -> Array:
        """Of rows, by their `row_statistic`."""
        return statistic == (-jnp.inf if self.folds_lse else jnp.inf)

    def probabilities(
        self, products: Array, lse: Array | None, bias: Array | None, mask: Array | None
    ) -> tuple[Array, Array]:
        """(p, p * soft_cap'): dS is the second times (dP - delta).

        `lse` is the `row_statistic`, or None where `folds_lse`: the products then contain it.
        """
        slope = None
        if self.folds_lse:
            p = jnp.exp2(products * (self.scale * LOG2E))
        else:
            logits = products * self.scale
            if bias is not None:
                logits = logits + bias
            if self.soft_cap is not None:
                t = soft_cap_tanh(logits, self.soft_cap)
                slope = 1.0 - t * t
                logits = t * self.soft_cap
            p = jnp.exp2(logits * LOG2E - lse)
        if mask is not None:
            if self.rows_share_bias:
                mask = mask & (lse < jnp.inf)
            p = jnp.where(mask, p, 0.0)
            if slope is not None and self.has_bias:
                slope = jnp.where(mask, slope, 0.0)  # the slope at a NaN bias is NaN
        return p, p if slope is None else p * slope


def load_rows(refs: dict[str, Any], batch: Any, rows: Any) -> dict[str, Array]:
    """Numbers of resident tokens."""
    return {name: plgpu.load(r.at[batch, rows], layout=ALONG_ROWS, optimized=False) for name, r in refs.items()}


def over_columns(ref: Any) -> Array:
    """Numbers of streamed tokens, broadcast to a tile that has them as columns."""
    return lax.broadcast_in_dim(plgpu.load(ref, layout=ALONG_COLS), (ROWS, *ref.shape), [1])


def int_vectors(count: int, ring: tuple[int, ...], tile: int) -> Any:
    """One buffer for all vectors of streamed tiles: each buffer of its own would begin at a multiple of 1024 bytes."""
    return plgpu.SMEM((count, *ring, tile), jnp.int32) if count else None


# Accumulators are registers of wgmma. Interpreted, they are float32 buffers: interpreted wgmma reads no registers.


def mma(acc: Any, a: Any, b: Any, *, transpose_a: bool = False, transpose_b: bool = False, interpret: bool) -> None:
    if not interpret:
        plgpu.wgmma(acc, a.transpose((1, 0)) if transpose_a else a, b.transpose((1, 0)) if transpose_b else b)
        return
    a, b = a[...].T if transpose_a else a[...], b[...].T if transpose_b else b[...]
    acc[...] = acc[...] + lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def read(acc: Any, *, in_flight: int, interpret: bool) -> Array:
    return acc[...] if interpret else plgpu.wgmma_accumulator_load(acc, wait_n=in_flight)


def opaque(x: Array, *, interpret: bool) -> Array:
    """The same value, hidden from the compiler: it would compute what depends on the value before the loop, and keep it
    in registers.
    """
    return x if interpret else lax.optimization_barrier(x)


def run_where(run: Any, *conditions: Any) -> None:
    """Runs it where all conditions hold; None always holds."""
    known = [condition for condition in conditions if condition is not None]
    when(functools.reduce(lambda a, b: a & b, known))(run) if known else run()


def with_zeros(body: Any, buffers: list[Any], shapes: list[tuple[int, int]], *, interpret: bool) -> Any:
    if not interpret:
        return pl.run_scoped(body, *[plgpu.ACC(shape, jnp.float32) for shape in shapes])
    for buffer in buffers:
        buffer[...] = jnp.zeros(buffer.shape, jnp.float32)
    return body(*buffers)


def with_values(body: Any, buffers: list[Any], values: list[Array], *, interpret: bool) -> None:
    """Runs `body(*accumulators)` and waits for every product that the body started."""
    if not interpret:
        pl.run_state(lambda refs: body(*refs))(tuple(plgpu.ACC.init(value) for value in values))
        return
    for buffer, value in zip(buffers, values, strict=True):
        buffer[...] = value
    body(*buffers)


def release(barrier: Any, *, interpret: bool) -> None:
    if interpret:
        plgpu.commit_smem()  # interpreted products read shared memory by ordinary loads
    plgpu.barrier_arrive(barrier)


def pad(x: Array, axis: int, size: int, value: float = 0) -> Array:
    if x.shape[axis] == size:
        return x
    return jnp.pad(x, [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)], constant_values=value)


def vectors(size: int, **named: Array | None) -> dict[str, Array]:
    return {name: pad(x, 1, size) for name, x in named.items() if x is not None}


def pad_bias(bias: Array, rows: int, cols: int) -> Array:
    bias = bias if bias.shape[2] == 1 else pad(bias, 2, rows)
    return bias if bias.shape[3] == 1 else pad(bias, 3, cols)


def load_bias(ref: Any, b: Any, h: Any, row: Any, col: Any, shape: tuple[int, int]) -> Array:
    lead = (0 if ref.shape[0] == 1 else b, 0 if ref.shape[1] == 1 else h)
    rows, cols = pl.ds(row, shape[0]), pl.ds(col, shape[1])
    if ref.shape[2] == 1 and ref.shape[3] == 1:
        return jnp.full(shape, ref[(*lead, 0, 0)].astype(jnp.float32))
    if ref.shape[2] == 1:
        x = plgpu.load(ref.at[(*lead, 0, cols)], layout=ALONG_COLS, optimized=False)
        return lax.broadcast_in_dim(x.astype(jnp.float32), shape, [1])
    if ref.shape[3] == 1:
        x = plgpu.load(ref.at[(*lead, rows, 0)], layout=ALONG_ROWS, optimized=False)
        return lax.broadcast_in_dim(x.astype(jnp.float32), shape, [0])
    return plgpu.load(ref.at[(*lead, rows, cols)], layout=WGMMA, optimized=False).astype(jnp.float32)


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
        # (`tile.turns`), there is a barrier between.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,  # the numbers of a row are in one warp
        ),
    )(given)
    return type(results)(*found)
