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

from xsake._fields import check_fields, one_of, whole
from xsake.hads.mask.band import Band
from xsake.kernels_pallas_gpu.limits import HOPPER_SHARED_MEMORY, hopper_sms
from xsake.kernels_pallas_gpu.mosaic_common import LOG2E, ListRefs, soft_cap_tanh
from xsake.kernels_pallas_gpu.mosaic_parts import Columns

Array = jax.Array

WGMMA = plgpu.Layout.WGMMA
ALONG_ROWS, ALONG_COLS = WGMMA.reduce(1), WGMMA.reduce(0)
L2_SHARE = 32 * 2**20  # bytes: the tiles that CTAs stream at one time should fit in this part of the L2 cache
ROWS = 64  # resident rows per compute warpgroup: the M of a wgmma
PART = 64  # columns at a time of a tile with a mask, bias or soft cap: their values take registers


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardConfig:
    """How the dQ or the dK/dV kernel is tiled.

    Args:
      tile: width of a streamed tile (keys for dQ, queries for dK/dV).
      stages: depth of the ring that is read first and last in a step (K for dQ, Q for dK/dV).
      inner_stages: depth of the other ring (V for dQ, dO for dK/dV).
      compute_wgs: compute warpgroups per CTA. Where a mask block is narrower than the rows of all warpgroups together,
        each warpgroup walks its own list.
      split: dK/dV only: one warpgroup computes dV and the other dK of the same keys. None: split where the accumulators
        of both do not fit in one warpgroup.
      gather: dK/dV only: read only the queries that chose a block of keys, where the mask has a bit per query; both
        warpgroups then share one ring. None: wherever `mosaic_gathered` knows the call.
      resident_stages: 2 loads the resident rows of the next item ahead; None does so where shared memory has room.
      compute_registers, memory_registers: registers per thread of a compute and of a memory warpgroup.
    """

    tile: int = one_of(64, 128, default=64)
    stages: int = whole(1, 32, default=2)
    inner_stages: int = whole(1, 32, default=2)
    compute_wgs: int = one_of(1, 2, default=2)
    split: bool | None = one_of(None, False, True, default=None)
    gather: bool | None = one_of(None, False, True, default=None, before=None)
    resident_stages: int | None = one_of(None, 1, 2, default=None, before=None)
    # setmaxnreg takes multiples of 8 from 24 to 256.
    compute_registers: int = whole(24, 256, multiple_of=8, default=240)
    memory_registers: int = whole(24, 256, multiple_of=8, default=24)

    def __post_init__(self) -> None:
        check_fields(self)
        # A CTA of three warpgroups starts with 168 registers per thread. If the compute warpgroups asked for more than
        # the memory warpgroup gives back, they would wait for ever.
        registers, most = self.compute_wgs * self.compute_registers + self.memory_registers, 3 * 168
        if registers > most:
            raise ValueError(f"compute_wgs * compute_registers + memory_registers = {registers} must be at most {most}")

    def splits(self, d: int, dv: int) -> bool:
        return d + dv > 256 if self.split is None else self.split

    def loads_ahead(self, kernel: str, resident_block: int, d: int, dv: int, vectors: int) -> bool:
        """Whether there are two stages of resident rows; the arguments are those of `smem_bytes`."""
        if self.resident_stages is not None:
            return self.resident_stages == 2
        if kernel == "dkv" and self.splits(d, dv):
            return False
        two = dataclasses.replace(self, resident_stages=2)
        return smem_bytes(kernel, two, resident_block, d, dv, vectors) <= HOPPER_SHARED_MEMORY


def smem_bytes(kernel: str, config: BackwardConfig, resident_block: int, d: int, dv: int, vectors: int) -> int:
    """Bytes of shared memory of the kernel "dq" or "dkv", whose streamed tiles bring so many int32 `vectors`.

    Every buffer begins at a multiple of 1024 bytes. The last terms: notes of `mosaic_turns`, and barriers.
    """
    split = kernel == "dkv" and config.splits(d, dv)
    tile_wgs = 1 if split else config.compute_wgs
    rings = tile_wgs if resident_block % (ROWS * tile_wgs) else 1
    outer, inner = rings * config.stages * config.tile, rings * config.inner_stages * config.tile
    numbers = [vectors * outer, *((outer, inner) if kernel == "dkv" else ()), ROWS * config.tile * split]
    residents = (config.resident_stages or 1) * tile_wgs * ROWS
    tiles = 2 * (residents * (d + dv) + outer * d + inner * dv)
    return tiles + sum(pl.cdiv(4 * n, 1024) * 1024 for n in numbers) + 1024 + 1024


def default_dq_config(d: int, dv: int, block_q: int, block_kv: int, vectors: int, *, one_stage: bool) -> BackwardConfig:
    """`one_stage`, here and below: of resident rows, at most."""
    wide = 128 if block_kv % 128 == 0 and max(d, dv) <= 128 else 64
    return first_fit(
        "dq",
        (block_q, d, dv, vectors),
        [
            dict(tile=wide, stages=2, inner_stages=2, resident_stages=2),
            dict(tile=wide, stages=2, inner_stages=1, resident_stages=2),
            dict(tile=wide, stages=2, inner_stages=2),
            dict(tile=64, stages=3, inner_stages=3),
            dict(tile=64, stages=2, inner_stages=2),
            dict(tile=64, stages=2, inner_stages=1),
            dict(tile=64, stages=2, inner_stages=2, compute_wgs=1),
            dict(tile=64, stages=1, inner_stages=1, compute_wgs=1),
        ],
        one_stage=one_stage,
    )


def default_dkv_config(
    d: int, dv: int, block_q: int, block_kv: int, vectors: int, *, one_stage: bool
) -> BackwardConfig:
    wide = 128 if block_q % 128 == 0 and max(d, dv) <= 64 else 64
    return first_fit(
        "dkv",
        (block_kv, d, dv, vectors),
        [
            dict(tile=wide, stages=4, inner_stages=4, resident_stages=2),
            dict(tile=wide, stages=3, inner_stages=2, resident_stages=2),
            dict(tile=wide, stages=4, inner_stages=4),
            dict(tile=wide, stages=3, inner_stages=3),
            dict(tile=64, stages=2, inner_stages=2),
            dict(tile=64, stages=1, inner_stages=1),
        ],
        one_stage=one_stage or BackwardConfig().splits(d, dv),
    )


def search_space(
    kernel: str, d: int, dv: int, block_q: int, block_kv: int, vectors: int, *, one_stage: bool
) -> list[BackwardConfig]:
    """Configurations of the kernel "dq" or "dkv" that fit, the default first."""
    of_dq = kernel == "dq"
    resident, streamed = (block_q, block_kv) if of_dq else (block_kv, block_q)
    heuristic = default_dq_config if of_dq else default_dkv_config
    default = heuristic(d, dv, block_q, block_kv, vectors, one_stage=one_stage)
    found = {default: None, dataclasses.replace(default, resident_stages=1): None}
    for tile in (64, 128):
        for stages, inner_stages in ((2, 1), (2, 2), (3, 2), (3, 3), (4, 4)):
            config = BackwardConfig(tile=tile, stages=stages, inner_stages=inner_stages, resident_stages=1)
            # Float32 registers per thread that the accumulators take; beyond 192 they spill.
            accumulators = (d if of_dq else d + dv) // 2 + tile
            need = smem_bytes(kernel, config, resident, d, dv, vectors)
            fits = streamed % tile == 0 and need <= HOPPER_SHARED_MEMORY
            split = not of_dq and config.splits(d, dv)
            if fits and (tile == ROWS or (accumulators <= 192 and not split)):
                two = dataclasses.replace(config, resident_stages=2)
                room = smem_bytes(kernel, two, resident, d, dv, vectors) <= HOPPER_SHARED_MEMORY
                found[two if room and not split and not one_stage else config] = None
    return list(found)


def first_fit(
    kernel: str, of_call: tuple[int, int, int, int], candidates: list[dict[str, int]], *, one_stage: bool
) -> BackwardConfig:
    """`of_call`: what `smem_bytes` takes after the configuration."""
    for candidate in candidates:
        config = BackwardConfig(**{"resident_stages": 1, **candidate})
        fits = smem_bytes(kernel, config, *of_call) <= HOPPER_SHARED_MEMORY
        if fits and not (one_stage and config.resident_stages == 2):
            return config
    dims = f"head dims {of_call[1]} and {of_call[2]}"
    raise NotImplementedError(
        f"{dims} need more than {HOPPER_SHARED_MEMORY} bytes of shared memory in every configuration"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitRule:
    """How logits become probabilities, and which elements attend; all of it known while tracing."""

    scale: float
    band: Band
    soft_cap: float | None
    has_bias: bool
    # Rows past the last query have no weight, but a bias of NaN for keys that they alone attend would reach dK.
    rows_share_bias: bool = False

    @property
    def by_position(self) -> bool:
        return self.band != Band()

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

    def may_attend(self, q_first: Any, kv_first: Any, q_count: int, kv_count: int) -> Any:
        """Whether the band allows any element of a tile, by the tile's indices; None where there is no band."""
        left, right = self.band
        tests = []
        if right is not None:
            tests.append(kv_first <= q_first + (q_count - 1 + right))
        if left is not None:
            tests.append(kv_first + (kv_count - 1 + left) >= q_first)
        return functools.reduce(jnp.logical_and, tests) if tests else None

    def all_attend(self, q_first: Any, kv_first: Any, q_count: int, kv_count: int) -> Any:
        """Whether the band allows every element of a tile, by the tile's indices; None where there is no band."""
        left, right = self.band
        tests = []
        if right is not None:
            tests.append(kv_first + (kv_count - 1 - right) <= q_first)
        if left is not None:
            tests.append(kv_first + left >= q_first + (q_count - 1))
        return functools.reduce(jnp.logical_and, tests) if tests else None

    def attends(self, shape, q_axis: int, q_pos, kv_pos, q_seg, kv_seg, kv_in_range) -> Array | None:
        """bool[shape], or None where nothing is tested. Queries lie along `q_axis`, keys along the other."""

        def over_q(x: Array) -> Array:
            return lax.broadcast_in_dim(x, shape, [q_axis])

        def over_kv(x: Array) -> Array:
            return lax.broadcast_in_dim(x, shape, [1 - q_axis])

        left, right = self.band
        tests = []
        if right is not None:
            tests.append(over_q(q_pos + right) >= over_kv(kv_pos))
        if left is not None:
            tests.append(over_q(q_pos - left) <= over_kv(kv_pos))
        if q_seg is not None:
            tests.append(over_q(q_seg) == over_kv(kv_seg))
        if kv_in_range is not None:
            tests.append(over_kv(kv_in_range))
        return functools.reduce(jnp.logical_and, tests) if tests else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkGrid:
    """Which resident rows each ring of a CTA works on, item by item.

    A CTA has one ring, whose rows all its compute warpgroups share, or one ring per compute warpgroup. Items are
    numbered section by section, and inside a section rank by rank: the longest rows of all its pairs come first. The
    longest of all pairs, a column for a sink for instance, may come before all sections (`mosaic_parts`).
    """

    pairs: int  # (batch, head) pairs
    section: int  # pairs per section: few enough for their streamed tiles to share the L2 cache
    blocks: int  # mask rows per pair
    unit: int  # resident rows per ring
    units_per_block: int
    rings: int
    early: int = 0  # ranks that come before all sections

    @classmethod
    def make(
        cls, pairs: int, length: int, block: int, compute_wgs: int, streamed_bytes: int, *, early: int = 0
    ) -> "WorkGrid":
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
        return self.pairs * self.ranks

    @property
    def columns(self) -> Columns:
        early = min(self.early, self.ranks)
        return Columns(pairs=self.pairs, section=self.section, ranks=self.ranks, early=early)

    def rank_and_pair(self, number: Any, interleaved: Any = None) -> tuple[Any, Any]:
        """Of an item. `interleaved`: what `Columns.interleaved` says, as a ref."""
        pair, rank, _ = self.columns.place(number, interleaved)
        return rank, pair

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
    pl.when(functools.reduce(lambda a, b: a & b, known))(run) if known else run()


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

        @pl.when(i < count)
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
        # (`mosaic_turns`), there is a barrier between.
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,  # the numbers of a row are in one warp
        ),
    )(*operands)
