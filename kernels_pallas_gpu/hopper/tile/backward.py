"""What the dQ and dK/dV kernels for Hopper share. dQ walks the row lists, dK/dV the transposed lists; no atomic sums.

    P = exp(S - lse)    S = soft_cap(scale * Q K^T + bias), masked
    dS = P * (dO V^T - delta) * soft_cap'
    dQ = scale * dS K    dK = scale * dS^T Q    dV = P^T dO

Each compute warpgroup holds 64 *resident* rows (Q and dO for dQ, K and V for dK/dV) and walks the list of their mask
row. The memory warpgroup reads the same list and *streams* the tiles of the other side through two rings of shared
memory. Resident rows are the M of every wgmma, so that P and dS are the left operands of the next product as they come,
in registers.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu.hopper.limits import hopper_sms
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS
from xsake.kernels_pallas_gpu.hopper.tile.common import LOG2E, ListRefs, soft_cap_tanh
from xsake.kernels_pallas_gpu.hopper.tile.conditions import when
from xsake.kernels_pallas_gpu.hopper.tile.element_rule import ElementRule
from xsake.kernels_pallas_gpu.hopper.tile.parts import Columns

Array = jax.Array

WGMMA = plgpu.Layout.WGMMA
ALONG_ROWS, ALONG_COLS = WGMMA.reduce(1), WGMMA.reduce(0)
L2_SHARE = 32 * 2**20  # bytes: the tiles that CTAs stream at one time should fit in this part of the L2 cache
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColumnPlan:
    """What kernels that hold columns of keys know of a call while tracing."""

    batch_size: int
    q_len: int
    kv_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: Any
    block_q: int
    block_kv: int
    elements: ElementRule
    rule: LogitRule
    full_is_exact: bool
    has_bias: bool
    interpret: Any

    @staticmethod
    def of_call(call: Call) -> dict[str, Any]:
        """All fields but `interpret`."""
        bias, block_q = call.bias, call.mask.block_q
        rule = LogitRule(
            scale=call.scale,
            soft_cap=call.soft_cap,
            has_bias=bias is not None,
            rows_share_bias=bias is not None and bias.shape[2] == 1 and call.q_len % block_q != 0,
        )
        return dict(
            batch_size=call.batch,
            q_len=call.q_len,
            kv_len=call.kv_len,
            num_q_heads=call.q_heads,
            num_kv_heads=call.kv_heads,
            head_dim=call.head_dim,
            v_head_dim=call.value_dim,
            dtype=call.query.dtype,
            block_q=block_q,
            block_kv=call.mask.block_kv,
            elements=ElementRule(band=call.band, kv_len=None, q_axis=1),  # the store drops keys past the end
            rule=rule,
            full_is_exact=call.full_is_exact,
            has_bias=bias is not None,
        )

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def pairs(self) -> int:
        return self.batch_size * self.num_kv_heads

    @property
    def simulate(self) -> bool:
        return bool(self.interpret)

    @property
    def q_size(self) -> int:
        return pl.cdiv(self.q_len, self.block_q) * self.block_q

    @property
    def kv_size(self) -> int:
        return pl.cdiv(self.kv_len, self.block_kv) * self.block_kv


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkGrid:
    """Which resident rows each ring of a CTA works on, item by item.

    A CTA has one ring, whose rows all its compute warpgroups share, or one ring per compute warpgroup. Items are
    numbered section by section, and inside a section rank by rank: the longest rows of all its pairs come first. The
    longest of all pairs, a column for a sink for instance, may come before all sections, cut into parts
    (`tile.parts`).
    """

    pairs: int  # (batch, head) pairs
    section: int  # pairs per section: few enough for their streamed tiles to share the L2 cache
    blocks: int  # mask rows per pair
    unit: int  # resident rows per ring
    units_per_block: int
    rings: int
    early: int = 0  # ranks that come before all sections
    parts: int = 1  # items that share an early rank

    @classmethod
    def make(
        cls,
        pairs: int,
        length: int,
        block: int,
        compute_wgs: int,
        streamed_bytes: int,
        *,
        early: int = 0,
        parts: int = 1,
    ) -> "WorkGrid":
        """Early ranks are cut into `parts` only where a CTA has one ring."""
        shared = block % (ROWS * compute_wgs) == 0
        unit = ROWS * compute_wgs if shared else ROWS
        return cls(
            pairs=pairs,
            section=max(1, min(pairs, L2_SHARE // streamed_bytes)),
            blocks=pl.cdiv(length, block),
            unit=unit,
            units_per_block=block // unit,
            rings=1 if shared else compute_wgs,
            early=early,
            parts=parts if shared else 1,
        )

    @property
    def ranks(self) -> int:
        return pl.cdiv(self.blocks * self.units_per_block, self.rings)

    @property
    def all_exist(self) -> bool:
        """Whether every rank has rows for every ring."""
        return self.blocks * self.units_per_block % self.rings == 0

    @property
    def items(self) -> int:
        return self.columns.ctas

    @property
    def columns(self) -> Columns:
        early = min(self.early, self.ranks)
        return Columns(pairs=self.pairs, section=self.section, ranks=self.ranks, early=early, parts=self.parts)

    def place(self, lists: ListRefs, coords: tuple[Any, Any], rank: Any, ring: Any) -> tuple[Any, Any, Any]:
        """(first resident row, mask row, whether the rank has rows for this ring: if not, the first row is -1)."""
        unit, units = rank * self.rings + ring, self.blocks * self.units_per_block
        exists: Any = True
        if not self.all_exist:
            exists, unit = unit < units, jnp.minimum(unit, units - 1)
        block = lists.ranked(*coords, lax.div(unit, self.units_per_block))
        first = (block * self.units_per_block + lax.rem(unit, self.units_per_block)) * self.unit
        return first if exists is True else jnp.where(exists, first, -1), block, exists


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streamed:
    """The tiles that are streamed past resident rows: those of the blocks in a list."""

    lists: ListRefs
    full_is_exact: bool
    block: int
    tile: int

    @property
    def per_block(self) -> int:
        return self.block // self.tile

    def span(self, coords: tuple[Any, Any], row: Any, exists: Any) -> tuple[Any, Any, Any]:
        """(first list entry, tiles of full blocks, tiles of all blocks) of a list."""
        begin, full_end, end = self.lists.row(*coords, row)
        full, total = full_end - begin if self.full_is_exact else jnp.int32(0), end - begin
        if exists is not True:
            full, total = jnp.where(exists, full, 0), jnp.where(exists, total, 0)
        return begin, full * self.per_block, total * self.per_block

    def start(self, coords: tuple[Any, Any], begin: Any, t: Any) -> Any:
        """The first row of tile t of a list."""
        block = self.lists.indices[(*coords, begin + lax.div(t, self.per_block))]
        return block * self.block + lax.rem(t, self.per_block) * self.tile


def active_keys(call: Call) -> float:
    """That a query attends to on average, by the density that the mask tells; half of all where the call is causal."""
    density = call.mask.most_density if call.mask.density_hint is None else call.mask.density_hint
    return density * call.kv_len * (0.5 if call.band.right == 0 else 1.0)


def longest_share(call: Call) -> float:
    """A column of 128 keys that every query lists, as a part of the work that there is for one SM."""
    columns = call.batch * call.kv_heads * max(active_keys(call), 1.0) / (2 * ROWS)  # of such a length
    return hopper_sms() / columns


def early_ranks(pairs: int) -> int:
    """Ranks that come before all sections: about as many CTAs as half of the chip runs at a time."""
    return max(1, hopper_sms() // 2 // pairs)


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


def drain(free: Any, stages: int, count: Any, ring: tuple[int, ...] = ()) -> None:
    """Waits for the last releases of a ring: the interpreter requires that every completed barrier was waited for."""
    for i in range(stages):

        @when(i < count)
        def _(i=i):
            plgpu.barrier_wait(free.at[(*ring, lax.rem(count - 1 - i, stages))])


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
    kernel: Any,
    name: str,
    ctas: int,
    compute_wgs: int,
    out_type: Any,
    operands: list[Any],
    scratch: list[Any],
    interpret: Any,
) -> Any:
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch,
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
    )(*operands)
