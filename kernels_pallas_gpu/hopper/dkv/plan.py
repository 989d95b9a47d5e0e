"""How the Hopper dK/dV kernel cuts a call into columns of keys, and a CTA's shared memory."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS, BackwardConfig
from xsake.kernels_pallas_gpu.hopper.tile.logits import PART
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing
from xsake.kernels_pallas_gpu.hopper.tile.products import swizzled
from xsake.kernels_pallas_gpu.hopper.tile.vectors import int_vectors
from xsake.kernels_pallas_gpu.hopper.work.plan import (
    StreamBarriers,
    StreamingPlan,
    WorkGrid,
    early_ranks,
    longest_share,
)
from xsake.kernels_pallas_gpu.lists.wide_columns import run_of

# Fields of an item: the pair, which part of an early column (below 0: all of any column), and for every ring the first
# resident key (below 0: there is none) and the mask column.
PAIR, PIECE, START, COLUMN = range(4)
MOST_PARTS = 8


class DkvMemory(NamedTuple):
    """Shared memory. `simulated`: float32 accumulators, if the kernel is interpreted."""

    k: Any
    v: Any
    q: Any
    statistic: Any
    do: Any
    delta: Any
    q_vectors: Any
    simulated: list[Any]


class HandOver(NamedTuple):
    """Where two warpgroups share keys: P, on its way from one to the other, and `finished`, once both have read all."""

    p: Any = None
    p_ready: Any = None
    p_free: Any = None
    finished: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DkvPlan(StreamingPlan):
    """All that is known while tracing. `q_vectors`: names of the operands with one number per query. `parts`: items
    that share an early column, each with some of the group's heads. `float32_results`: results are written as they are
    in the registers, for they are terms of a sum. `run`: keys per run of a wide column, into which neighbouring short
    blocks are merged (`lists.wide_columns`), or None; `block_kv` is then the column's.
    """

    q_vectors: tuple[str, ...]
    parts: int
    float32_results: bool
    run: int | None

    FIELDS = START, 2

    @classmethod
    def of(
        cls,
        call: Call,
        packing: Packing,
        config: BackwardConfig,
        interpret: Any = False,
        float32_results: bool = False,
    ) -> "DkvPlan":
        fields = cls.of_call(call)
        run = None
        if call.mask.block_kv < ROWS:
            apart = config.compute_wgs == 1 or config.splits(call.head_dim, call.value_dim)
            fields["block_kv"] = ROWS if apart else 2 * ROWS  # the keys of a CTA
            run = run_of(call.mask.block_kv, ROWS)
        by_position = fields["elements"].by_position
        has_numbers = dict(
            position=by_position and call.q_positions is not None,
            segment=call.q_segments is not None,
            index=by_position and call.q_positions is None,
        )
        return cls(
            **fields | {"num_q_heads": call.q_heads // packing.group},
            packing=packing,
            has_bits=call.mask.bitmaps is not None or run is not None,
            q_vectors=tuple(name for name, there in has_numbers.items() if there),
            parts=_parts(call, packing, config),
            float32_results=float32_results,
            run=run,
            config=config,
            interpret=interpret,
        )

    @property
    def split(self) -> bool:
        """Where the accumulators of dK and dV do not fit in the registers of one warpgroup, two share 64 keys."""
        return self.config.splits(self.head_dim, self.v_head_dim)

    @property
    def skips(self) -> bool:
        """Whether token indices show which tiles of queries the band excludes for all keys."""
        return "index" in self.q_vectors

    @property
    def one_copy(self) -> bool:
        """Whether full and masked tiles share their code, because every copy takes time to compile."""
        tests = self.elements.by_position or "segment" in self.q_vectors
        return tests and self.rule.folds_lse and not self.has_bits and self.tile == PART and not self.split

    @property
    def band_apart(self) -> bool:
        """Whether the band is tested only where it excludes elements: most tiles are masked by their runs alone."""
        return self.run is not None and self.skips and self.rule.folds_lse

    # -- which column --------------------------------------------------------------------------------------------------

    @property
    def work(self) -> WorkGrid:
        streamed_bytes = self.packing.group * self.group * self.q_len * (self.head_dim + self.v_head_dim) * 2
        cut = dict(early=early_ranks(self.pairs), parts=self.parts)
        return WorkGrid.make(self.pairs, self.kv_len, self.block_kv, self._tile_wgs, streamed_bytes, **cut)

    def result_like(self, x: Array) -> jax.ShapeDtypeStruct:
        """Of the gradient of these keys or values. TMA alone drops keys past the end, and it writes no float32."""
        if not self.float32_results:
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ShapeDtypeStruct((x.shape[0], self.kv_size, *x.shape[2:]), jnp.float32)

    # -- shared memory -------------------------------------------------------------------------------------------------

    @property
    def _tile_wgs(self) -> int:
        """Warpgroups that hold keys of their own."""
        return 1 if self.split else self.compute_wgs

    @property
    def streamed_block(self) -> int:
        return self.packing.rows

    @property
    def missing(self) -> int:
        return self.packing.length(self.q_len)  # a tile is one run, which exists

    @property
    def one_stage(self) -> bool:
        return self.split

    def shared(self) -> list[Any]:
        return [self.memory(), self.barriers(), self.hand_over(), self.turns.memory()]

    def memory(self) -> DkvMemory:
        (outer, inner), tile = self.rings, self.tile
        residents = (1 + self.ahead) * self._tile_wgs, ROWS
        return DkvMemory(
            k=swizzled((*residents, self.head_dim), self.dtype),
            v=swizzled((*residents, self.v_head_dim), self.dtype),
            q=swizzled((*outer, tile, self.head_dim), self.dtype),
            statistic=plgpu.SMEM((*outer, tile), jnp.float32),
            do=swizzled((*inner, tile, self.v_head_dim), self.dtype),
            delta=plgpu.SMEM((*inner, tile), jnp.float32),
            q_vectors=int_vectors(len(self.q_vectors), outer, tile),
            simulated=self.simulated((ROWS, self.head_dim), (ROWS, self.v_head_dim), (ROWS, tile), (ROWS, tile)),
        )

    def barriers(self) -> StreamBarriers:
        pieces = self.packing.pieces(self.tile)
        outer, inner = pieces + 1 + len(self.q_vectors), pieces + 1
        return self.barriers_of(resident=1 if self.split else 2, outer=outer, inner=inner)

    def hand_over(self) -> HandOver:
        if not self.split:
            return HandOver()
        transforms = plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)
        return HandOver(
            p=plgpu.SMEM((ROWS, self.tile), jnp.float32, transforms=transforms),
            p_ready=plgpu.Barrier(),
            p_free=plgpu.Barrier(),
            finished=plgpu.Barrier(num_arrivals=2),
        )


def _parts(call: Call, packing: Packing, config: BackwardConfig) -> int:
    """1, or more where a column that every query lists may take longer than all other work of an SM."""
    if packing.group > 1 or config.splits(call.head_dim, call.value_dim) or longest_share(call) <= 1:
        return 1
    group = call.q_heads // call.kv_heads
    return max(parts for parts in range(1, MOST_PARTS + 1) if group % parts == 0)
