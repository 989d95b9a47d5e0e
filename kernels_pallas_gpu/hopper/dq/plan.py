"""How the Hopper dQ kernel cuts a call into items, and the shared memory of a CTA."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS, BackwardConfig
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing
from xsake.kernels_pallas_gpu.hopper.tile.products import swizzled
from xsake.kernels_pallas_gpu.hopper.tile.vectors import int_vectors
from xsake.kernels_pallas_gpu.hopper.work.plan import StreamBarriers, StreamingPlan, WorkGrid

# Fields of an item: the pair, and for every ring the first resident row (below 0: there is none), the first list entry,
# tiles of full blocks, and tiles of all blocks.
PAIR, START, BEGIN, FULL, TILES = range(5)


class DqMemory(NamedTuple):
    """Shared memory. `starts`: the first keys of every tile's runs, or None. `simulated`: float32 accumulators, if the
    kernel is interpreted.
    """

    q: Any
    do: Any
    k: Any
    v: Any
    kv_vectors: Any
    starts: Any
    simulated: list[Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DqPlan(StreamingPlan):
    """All that is known while tracing. `kv_vectors`: names of the operands with one number per key. `sums_delta`:
    whether the kernel sums delta itself: it has dO in shared memory anyway.
    """

    kv_vectors: tuple[str, ...]
    sums_delta: bool

    FIELDS = START, 4

    @classmethod
    def of(cls, call: Call, packing: Packing, config: BackwardConfig, *, sums_delta: bool, interpret: Any) -> "DqPlan":
        fields = cls.of_call(call, holds_keys=False)
        gathers = call.mask.block_kv < ROWS
        if gathers:  # runs that do not exist begin past the end
            fields["elements"] = dataclasses.replace(fields["elements"], kv_len=call.kv_len)
        by_position = fields["elements"].by_position
        has_numbers = dict(
            position=by_position and call.kv_positions is not None,
            segment=call.kv_segments is not None,
            index=fields["elements"].kv_len is not None or (by_position and call.kv_positions is None),
        )
        has_numbers["index"] &= not gathers  # it follows from the runs' first keys
        return cls(
            **fields | {"num_q_heads": call.q_heads // packing.group},
            packing=packing,
            has_bits=call.mask.bitmaps is not None,
            kv_vectors=tuple(name for name, there in has_numbers.items() if there),
            sums_delta=sums_delta,
            config=config,
            interpret=interpret,
        )

    @property
    def held_heads(self) -> int:
        return self.num_q_heads

    @property
    def ragged(self) -> bool:
        """Whether a tile of the last block may lie wholly past the end."""
        return self.elements.kv_len is not None

    @property
    def skips(self) -> bool:
        """Whether token indices show which keys the band excludes for all 64 queries."""
        return self.elements.by_position and "position" not in self.kv_vectors

    @property
    def bits_alone(self) -> bool:
        """Whether tiles wholly before the queries, most tiles of a list, need no test beside the bits."""
        return self.has_bits and self.skips and not self.ragged and "segment" not in self.kv_vectors

    @property
    def work(self) -> WorkGrid:
        # The heads of a group follow one another and find the K and V that they share in the L2 cache.
        streamed_bytes = self.kv_len * (self.head_dim + self.v_head_dim) * 2 // self.group or 1
        rows = self.packing.length(self.q_len)
        return WorkGrid.make(self.pairs, rows, self.packing.rows, self.compute_wgs, streamed_bytes)

    @property
    def streamed_block(self) -> int:
        return self.block_kv

    @property
    def gathers(self) -> bool:
        return self.block_kv < ROWS

    @property
    def unit(self) -> int:
        """Keys of a tile that follow one another."""
        return math.gcd(self.block_kv, self.tile)

    @property
    def missing(self) -> int:
        return self.kv_size

    @property
    def one_stage(self) -> bool:
        # A packed tile takes many copies, for which the memory warpgroup has too few registers.
        return self.packing.group > 1

    def memory(self) -> DqMemory:
        (outer, inner), tile = self.rings, self.tile
        residents = (1 + self.ahead) * self.compute_wgs, ROWS
        return DqMemory(
            q=swizzled((*residents, self.head_dim), self.dtype),
            do=swizzled((*residents, self.v_head_dim), self.dtype),
            k=swizzled((*outer, tile, self.head_dim), self.dtype),
            v=swizzled((*inner, tile, self.v_head_dim), self.dtype),
            kv_vectors=int_vectors(len(self.kv_vectors), outer, tile),
            starts=plgpu.SMEM((*outer, tile // self.unit), jnp.int32) if self.gathers else None,
            simulated=self.simulated((ROWS, self.head_dim), (ROWS, tile), (ROWS, tile)),
        )

    def barriers(self) -> StreamBarriers:
        runs = self.tile // self.unit
        return self.barriers_of(resident=2 * self.packing.pieces(ROWS), outer=runs + len(self.kv_vectors), inner=runs)
