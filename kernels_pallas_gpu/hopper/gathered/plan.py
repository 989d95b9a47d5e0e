"""Which calls the gathered dK/dV kernel for Hopper knows, how it cuts them into columns, and a CTA's shared memory."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu import limits
from xsake.kernels_pallas_gpu.hopper.gathered.ring import GatherRing
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS, BackwardConfig
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing
from xsake.kernels_pallas_gpu.hopper.tile.products import swizzled
from xsake.kernels_pallas_gpu.hopper.work.parts import Columns
from xsake.kernels_pallas_gpu.hopper.work.plan import L2_SHARE, BackwardPlan
from xsake.kernels_pallas_gpu.limits import hopper_sms

WGS = 2  # compute warpgroups
# The longest columns are cut into parts: every query may have chosen one block, the first for instance.
QUERIES_PER_PART, MOST_PARTS = 1024, 8


def unknown(call: Call, d: int, dv: int) -> str | None:
    """Why queries cannot be gathered in a call of head dimensions d and dv, or None."""
    mask = call.mask
    packing = Packing.of(mask.block_q, mask.heads, call.q_heads, call.kv_heads)
    if packing is None or packing.group == 1 or not packing.by_query:
        return "8, 16, 32 or 64 query heads must share a K/V head and its mask of blocks under 64 queries"
    if mask.bitmaps is None or mask.bitmaps.shape[3:] != (1, 1):
        return "the mask must have one bit per query and listed block"
    if call.soft_cap is not None or call.scale <= 0 or call.band.left is not None:
        return "there must be no soft_cap, no window and no scale of 0 or less"
    given = (call.q_segments, call.kv_segments, call.q_positions, call.kv_positions)
    if any(x is not None for x in given):
        return "there must be no segments and no positions"
    return f"head dims {d} and {dv} are more than 256 together" if d + dv > 256 else None


class GatheredMemory(NamedTuple):
    """Shared memory. `numbers`: the queries of every tile in the ring, and the lowest of them. `simulated`: float32
    accumulators, if the kernel is interpreted.
    """

    k: Any
    v: Any
    q: Any
    do: Any
    statistic: Any
    delta: Any
    numbers: Any
    simulated: list[Any]


class GatheredBarriers(NamedTuple):
    """`ready`: of `GatherRing`. `finished`: both warpgroups have multiplied all tiles. `handed_over`: the second has
    written its sums.
    """

    resident: Any
    ready: Any
    free: Any
    finished: Any
    handed_over: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatheredPlan(BackwardPlan):
    """All that is known while tracing. A pair is a batch entry and a K/V head, with columns of 64 keys."""

    config: BackwardConfig

    @classmethod
    def of(cls, call: Call, config: BackwardConfig, interpret: Any = False) -> "GatheredPlan":
        return cls(**cls.of_call(call), config=config, interpret=interpret)

    @property
    def packing(self) -> Packing:
        return Packing(self.group, self.block_q)

    @property
    def stages(self) -> int:
        return self.config.stages + self.config.inner_stages

    @property
    def pieces(self) -> int:
        """Queries per tile."""
        return self.packing.pieces(ROWS)

    @property
    def nobody(self) -> int:
        """The number of a query without weight, which fills the last tile: the first past the padded queries."""
        return -(-self.q_len // self.packing.whole) * self.packing.whole

    @property
    def columns_per_block(self) -> int:
        return self.block_kv // ROWS

    @property
    def columns(self) -> Columns:
        ranks = self.kv_size // ROWS
        parts = min(max(2, self.q_len // QUERIES_PER_PART), MOST_PARTS)
        streamed_bytes = self.q_len * self.group * (self.head_dim + self.v_head_dim) * 2
        return Columns(
            pairs=self.pairs,
            section=max(1, min(self.pairs, L2_SHARE // streamed_bytes)),
            ranks=ranks,
            early=min(ranks, max(1, hopper_sms() // (parts * self.pairs))),  # their parts fill the chip once
            parts=parts,
        )

    @property
    def one_stage(self) -> bool:
        """The keys of a CTA stay until it ends."""
        return True

    def misfit(self) -> str | None:
        """Why the configuration cannot serve the call, or None."""
        if self.config.tile != ROWS:
            return f"tile={self.config.tile} must be {ROWS}, as wide as a tile of gathered queries"
        if self.config.resident_stages == 2:
            return "this call needs resident_stages=1"
        return limits.misfit(self.smem_bytes())

    def ring(self, ready: Any, free: Any) -> GatherRing:
        tile_bytes = ROWS * (self.head_dim + self.v_head_dim) * 2 + 2 * ROWS * 4
        return GatherRing(ready=ready, free=free, stages=self.stages, interpret=self.simulate, tile_bytes=tile_bytes)

    def memory(self) -> GatheredMemory:
        ring = self.stages, ROWS
        accumulators = (ROWS, self.head_dim), (ROWS, self.v_head_dim), (ROWS, ROWS), (ROWS, ROWS)
        return GatheredMemory(
            k=swizzled((ROWS, self.head_dim), self.dtype),
            v=swizzled((ROWS, self.v_head_dim), self.dtype),
            q=swizzled((*ring, self.head_dim), self.dtype),
            do=swizzled((*ring, self.v_head_dim), self.dtype),
            statistic=plgpu.SMEM(ring, jnp.float32),
            delta=plgpu.SMEM(ring, jnp.float32),
            numbers=plgpu.SMEM((self.stages, self.pieces + 1), jnp.int32),
            simulated=[plgpu.SMEM((WGS, *shape), jnp.float32) for shape in accumulators if self.simulate],
        )

    def barriers(self) -> GatheredBarriers:
        return GatheredBarriers(
            resident=plgpu.Barrier(num_arrivals=3),
            ready=GatherRing.scratch(self.stages, 4 * self.pieces, interpret=self.simulate),
            free=plgpu.Barrier(num_barriers=self.stages),
            finished=plgpu.Barrier(num_arrivals=WGS),
            handed_over=plgpu.Barrier(),
        )
