"""How the fused Hopper backward cuts a call into columns of keys, the columns' order, and a CTA's shared memory."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake._ground.fields import check_fields, flag, one_of, whole
from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu import limits
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS
from xsake.kernels_pallas_gpu.hopper.tile.products import swizzled
from xsake.kernels_pallas_gpu.hopper.work.parts import Columns
from xsake.kernels_pallas_gpu.hopper.work.plan import BackwardPlan, active_keys, early_ranks, longest_share
from xsake.kernels_pallas_gpu.limits import HOPPER_L2_BYTES

COMPUTE_WGS = 2
KEYS = COMPUTE_WGS * ROWS  # of a CTA; each compute warpgroup has 64 of them
HEAD_DIMS = (64, 128)
REGISTERS = (240, 24)  # per thread of a compute and of the memory warpgroup
DS_STAGES = 2
# Fuse from so many keys per query on. Measured on an H200; sums of integers cost more than sums of floats.
WORTH_FUSING, WORTH_FUSING_FLOATS = 3500, 1200


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedConfig:
    """How the fused backward is scheduled.

    Args:
      use: whether dQ, dK and dV come from this kernel; otherwise one kernel computes dQ and another dK and dV.
      tile: queries per step.
      q_stages, do_stages: depth of the rings of Q and of dO.
      early: number of columns per K/V head, the longest ones, that start before all other columns of all heads.
      parts: CTAs that share one early column.
    """

    use: bool = flag(default=True)
    tile: int = one_of(64, 128, default=64, before=64)
    q_stages: int = whole(2, 8, default=2)
    do_stages: int = whole(2, 8, default=2)
    early: int = whole(0, 2**16, default=0)
    parts: int = whole(1, 64, default=1)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.parts > 1 and not self.early:
            raise ValueError(f"parts={self.parts} needs early columns to cut: early=0")


class FusedMemory(NamedTuple):
    """Shared memory. `simulated`: float32 accumulators, if the kernel is interpreted."""

    k: Any
    v: Any
    q: Any
    do: Any
    ds: Any
    dq: Any
    statistic: Any
    delta: Any
    row_steps: Any
    channel_steps: Any
    q_vectors: dict[str, Any]
    simulated: list[Any]


class FusedBarriers(NamedTuple):
    """`ds_ready`: both compute warpgroups have written their halves of a dS. `all_read`: both have read all keys."""

    kv_ready: Any
    q_ready: Any
    do_ready: Any
    q_free: Any
    do_free: Any
    ds_ready: Any
    all_read: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedPlan(BackwardPlan):
    """All that is known while tracing. `q_vectors`, `kv_vectors`: names of the operands with one number per token."""

    q_vectors: tuple[str, ...]
    kv_vectors: tuple[str, ...]
    deterministic: bool
    config: FusedConfig

    @classmethod
    def of(cls, call: Call, config: FusedConfig, interpret: Any = False) -> "FusedPlan":
        fields = cls.of_call(call)
        elements = fields["elements"]
        if call.kv_len % call.mask.block_kv:
            # Keys past the end are zeros; times a probability that is no number (lse is far below 0) dQ would be NaN.
            elements = dataclasses.replace(elements, kv_len=call.kv_len)
        positions = ("position",) if elements.by_position else ()
        segments = ("segment",) if call.q_segments is not None else ()
        return cls(
            **fields | {"elements": elements},
            q_vectors=(*(("index",) if call.q_positions is None and positions else positions), *segments),
            kv_vectors=(*(() if call.kv_positions is None else positions), *segments),
            deterministic=call.deterministic,
            config=config,
            interpret=interpret,
        )

    @property
    def dq_dtype(self) -> Any:
        return jnp.int32 if self.deterministic else jnp.float32

    @property
    def step_dtype(self) -> Any:
        """The type of the rows' steps. They are powers of two, and float16 does not hold all of them."""
        return self.dtype if self.dtype == jnp.bfloat16 else jnp.float32

    # -- which column --------------------------------------------------------------------------------------------------
    # A pair is a batch entry and a K/V head. Its columns of 128 keys are ranked by length, longest first.

    @property
    def columns_per_block(self) -> int:
        return self.block_kv // KEYS

    @property
    def ranks(self) -> int:
        return self.kv_size // KEYS

    @property
    def early(self) -> int:
        return min(self.config.early, self.ranks)

    @property
    def parts(self) -> int:
        return self.config.parts if self.early else 1

    @property
    def section(self) -> int:
        """Number of pairs with interleaved columns: Q, dO and dQ's sums of one head per pair fit in the L2 cache."""
        per_head = self.q_len * (2 * self.head_dim + 2 * self.v_head_dim + 4 * self.head_dim)
        return max(1, min(self.pairs, HOPPER_L2_BYTES // per_head))

    @property
    def columns(self) -> Columns:
        return Columns(pairs=self.pairs, section=self.section, ranks=self.ranks, early=self.early, parts=self.parts)

    # -- shared memory -------------------------------------------------------------------------------------------------

    # Each compute warpgroup multiplies half of dQ: of the queries where a tile has as many as both have rows, otherwise
    # of the columns.

    @property
    def tile(self) -> int:
        return self.config.tile

    @property
    def halves_queries(self) -> bool:
        return self.tile == COMPUTE_WGS * ROWS

    @property
    def dq_shape(self) -> tuple[int, int]:
        return ROWS, self.head_dim // (1 if self.halves_queries else COMPUTE_WGS)

    def memory(self) -> FusedMemory:
        q_ring, do_ring = (self.config.q_stages, self.tile), (self.config.do_stages, self.tile)
        accumulators = (ROWS, self.head_dim), (ROWS, self.v_head_dim), *2 * [(ROWS, self.tile)], self.dq_shape
        widest = self.dq_shape[1]
        return FusedMemory(
            k=swizzled((KEYS, self.head_dim), self.dtype, widest),
            v=swizzled((KEYS, self.v_head_dim), self.dtype),
            q=swizzled((*q_ring, self.head_dim), self.dtype, widest),
            do=swizzled((*do_ring, self.v_head_dim), self.dtype),
            ds=swizzled((DS_STAGES, KEYS, self.tile), self.dtype, widest),
            dq=plgpu.SMEM(
                (COMPUTE_WGS, *self.dq_shape),
                self.dq_dtype,
                transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),
            ),
            statistic=plgpu.SMEM(q_ring, jnp.float32),
            delta=plgpu.SMEM(do_ring, jnp.float32),
            row_steps=plgpu.SMEM(q_ring, self.step_dtype) if self.deterministic else None,
            channel_steps=plgpu.SMEM((self.head_dim,), jnp.float32) if self.deterministic else None,
            q_vectors={name: plgpu.SMEM(q_ring, jnp.int32) for name in self.q_vectors},
            simulated=[plgpu.SMEM((COMPUTE_WGS, *shape), jnp.float32) for shape in accumulators if self.simulate],
        )

    def barriers(self) -> FusedBarriers:
        q_stages, do_stages = self.config.q_stages, self.config.do_stages
        return FusedBarriers(
            kv_ready=plgpu.Barrier(num_arrivals=2 + self.deterministic),
            q_ready=plgpu.Barrier(num_arrivals=2 + self.deterministic + len(self.q_vectors), num_barriers=q_stages),
            do_ready=plgpu.Barrier(num_arrivals=2, num_barriers=do_stages),
            q_free=plgpu.Barrier(num_arrivals=COMPUTE_WGS, num_barriers=q_stages),
            do_free=plgpu.Barrier(num_arrivals=COMPUTE_WGS, num_barriers=do_stages),
            ds_ready=plgpu.Barrier(num_arrivals=COMPUTE_WGS, num_barriers=DS_STAGES),
            all_read=plgpu.Barrier(num_arrivals=COMPUTE_WGS),
        )


def misfit(call: Call, config: FusedConfig) -> str | None:
    """Why the fused kernel cannot serve a call that the Mosaic kernels can serve, or None."""
    if call.head_dim not in HEAD_DIMS or call.value_dim > max(HEAD_DIMS):
        return f"head dims {call.head_dim} and {call.value_dim} must be one of {HEAD_DIMS} and at most {max(HEAD_DIMS)}"
    if call.mask.block_kv % KEYS:
        return f"the mask's block of {call.mask.block_kv} keys must be a multiple of {KEYS}"
    if call.mask.block_q % config.tile:
        return f"tile={config.tile} does not divide the mask's block of {call.mask.block_q} queries"
    if config.tile > ROWS and max(call.head_dim, call.value_dim) > ROWS:
        dims = f"head dims {call.head_dim} and {call.value_dim}"
        return f"tile={config.tile} and {dims} need more registers than a thread has"
    return limits.misfit(FusedPlan.of(call, config).smem_bytes())


def heuristic(call: Call) -> FusedConfig:
    share = longest_share(call)
    early = early_ranks(call.batch * call.kv_heads) * (2 if share > 1 else 1)
    # All wait for a column that takes longer than an SM's other work. A sink's tiles take half again as long as those
    # of neighbours in a window, which find the same queries in the L2 cache.
    parts = 2 if share <= 0.5 else 4
    wide = call.head_dim == call.value_dim == ROWS and call.mask.block_q % (2 * ROWS) == 0
    config = FusedConfig(tile=2 * ROWS if wide else ROWS, early=early, parts=parts)
    # With few keys, the sums of dQ cost more than fusing saves.
    pays = active_keys(call) >= (WORTH_FUSING if call.deterministic else WORTH_FUSING_FLOATS)
    return dataclasses.replace(config, use=pays and call.soft_cap is None and misfit(call, config) is None)


def search_space(call: Call, default: FusedConfig) -> list[FusedConfig]:
    """The default, and the other configurations that fit the call."""
    cuts = [dict(early=n, parts=parts) for n, parts in ((0, 1), (1, 1), (4, 1), (8, 1), (4, 4), (8, 4), (8, 8))]
    rings = [dict(q_stages=n, do_stages=m) for n, m in ((3, 2), (2, 3))]
    tiles = [dict(tile=n) for n in (64, 128)]
    space = [dataclasses.replace(default, use=True, **change) for change in (*cuts, *rings, *tiles)]
    return [default, *(dict.fromkeys(c for c in space if c != default and misfit(call, c) is None))]
