"""How the Hopper forward cuts a call into tiles, who works on them, and the shared memory and barriers of a CTA."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu.hopper.forward.config import WG_ROWS, ForwardConfig, Pairing
from xsake.kernels_pallas_gpu.hopper.tile.bits import fits_in_lists
from xsake.kernels_pallas_gpu.hopper.tile.element_rule import ElementRule
from xsake.kernels_pallas_gpu.hopper.tile.launch import smem_bytes
from xsake.kernels_pallas_gpu.hopper.tile.logits import LOG2E
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing
from xsake.kernels_pallas_gpu.hopper.tile.products import swizzled
from xsake.kernels_pallas_gpu.limits import HOPPER_L2_BYTES
from xsake.kernels_pallas_gpu.lists.work_order import MOST_ITEMS


class ForwardItem(NamedTuple):
    """A query tile (batch, head, first query) and its `units` runs of keys, which begin at list entry `begin`.

    `steps` is -1 past the last item. `part`: where the results of a part of a row go; -1 for a whole row. Merged rows
    are not cut: for them, this field has `RowPairs.by_turns`.
    """

    steps: Any
    full_steps: Any
    batch: Any
    head: Any
    q_start: Any
    part: Any
    begin: Any
    units: Any


MOST_TURNS = 8  # sort rows by length only where a worker takes at most this many items

# The memory warpgroup tells the compute warpgroups the first six fields of an item.
PUBLISHED = 6
STEPS, FULL_STEPS, BATCH, HEAD, Q_START, PART = range(PUBLISHED)
BY_TURNS = PART  # of merged rows


class ForwardMemory(NamedTuple):
    """Shared memory.

    `notes`: numbers that the memory warpgroup writes for the others: two items, the runs in every slot of the K/V
    ring, two tickets and, where the mask has bitmaps, the bitmap of every run.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    kv_vectors: dict[str, Any]
    notes: Any


class ForwardBarriers(NamedTuple):
    item_ready: Any
    item_free: Any
    ticket_ready: Any
    q_ready: Any
    q_free: Any
    k_ready: Any
    k_free: Any
    v_ready: Any
    v_free: Any
    tensor_core: Any
    v_landed: Any  # values that the memory warpgroup changes before it says that they are ready


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardPlan:
    """All that is known of the packed call while tracing: `q_len` and `block_q` count rows.

    `has_row_bits`: the bits of a listed block are one word, a bit per query. `q_vectors`, `kv_vectors`: names of the
    operands with one number per row or key. `page`: keys per page, or None. `joined_kv`: as in `Call`. `own_lists`:
    whether every head of every batch entry has its own lists.
    """

    batch_size: int
    q_len: int
    kv_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: Any
    packing: Packing
    block_kv: int
    scale: float
    soft_cap: float | None
    full_is_exact: bool
    has_bias: bool
    has_sinks: bool
    has_bits: bool
    has_row_bits: bool
    q_vectors: tuple[str, ...]
    kv_vectors: tuple[str, ...]
    page: int | None
    joined_kv: bool
    own_lists: bool
    pairing: Pairing
    elements: ElementRule
    config: ForwardConfig
    interpret: Any

    @classmethod
    def of(
        cls, call: Call, packing: Packing, config: ForwardConfig, *, pairing: Pairing, interpret: Any = False
    ) -> "ForwardPlan":
        mask, heads = call.mask, call.q_heads // packing.group
        has_positions = call.q_positions is not None or call.kv_positions is not None
        has_numbers = dict(segments=call.q_segments is not None, positions=has_positions)
        given = [name for name, there in has_numbers.items() if there]
        return cls(
            batch_size=call.batch,
            q_len=packing.length(call.q_len),
            kv_len=call.kv_len,
            num_q_heads=heads,
            num_kv_heads=call.kv_heads,
            head_dim=call.head_dim,
            v_head_dim=call.value_dim,
            dtype=call.query.dtype,
            packing=packing,
            block_kv=mask.block_kv,
            scale=call.scale,
            soft_cap=call.soft_cap,
            full_is_exact=call.full_is_exact,
            has_bias=call.bias is not None,
            has_sinks=call.sink_lse is not None,
            has_bits=mask.bitmaps is not None,
            has_row_bits=mask.bitmaps is not None and fits_in_lists(mask.bitmaps.shape),
            q_vectors=tuple(f"q_{name}" for name in given),
            kv_vectors=tuple(f"kv_{name}" for name in given),
            page=call.page,
            joined_kv=call.joined_kv,
            own_lists=mask.kv_indices.shape[:2] == (call.batch, heads),
            pairing=config.pairing(pairing),
            elements=ElementRule(band=call.band, kv_len=call.kv_len, q_axis=0, any_position=has_positions),
            config=config,
            interpret=interpret,
        )

    @property
    def block_q(self) -> int:
        return self.packing.rows

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    # -- who works -----------------------------------------------------------------------------------------------------
    # An item is a query tile. A worker walks items, one per turn. It is a CTA, or one of its two warpgroups where they
    # work apart.

    @property
    def compute_wgs(self) -> int:
        return 1 if self.pairing is Pairing.ALONE else 2

    @property
    def workers_per_cta(self) -> int:
        return 2 if self.pairing is Pairing.APART else 1

    @property
    def rings(self) -> tuple[int, ...]:
        """The leading axis of buffers and barriers that every worker of a CTA has for itself; () with one worker."""
        return (2,) if self.pairing is Pairing.APART else ()

    @property
    def take_turns(self) -> bool:
        return self.config.take_turns and self.pairing in (Pairing.ROWS, Pairing.UNION, Pairing.HEADS)

    @property
    def num_ctas(self) -> int:
        most = pl.cdiv(self.num_items, self.workers_per_cta)
        return min(self.config.num_ctas or most, most)

    @property
    def num_workers(self) -> int:
        return self.num_ctas * self.workers_per_cta

    @property
    def persistent(self) -> bool:
        return self.num_items > self.num_workers

    @property
    def dynamic(self) -> bool:
        return self.persistent and self.config.schedule == "dynamic" and not self.interpret

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of (compute, memory) warpgroups; their sum is at most what the CTA starts with."""
        if self.pairing is Pairing.APART:
            return 216, 40
        # The memory warpgroup reads more of packed queries, unless their blocks are chosen by bits.
        many = self.has_row_bits if self.packing.group > 1 else self.ahead
        return (240, 24) if many else (232, 40)

    # -- items ---------------------------------------------------------------------------------------------------------

    @property
    def heads_per_tile(self) -> int:
        return 2 if self.pairing is Pairing.HEADS else 1

    @property
    def tile_rows(self) -> int:
        return 2 * WG_ROWS if self.pairing.halves_rows else WG_ROWS

    @property
    def row_size(self) -> int:
        """Queries per list: those of a mask row, or of two rows whose lists are merged."""
        return 2 * self.block_q if self.pairing is Pairing.UNION else self.block_q

    @property
    def subtiles(self) -> int:
        return self.row_size // self.tile_rows

    @property
    def num_rows(self) -> int:
        return pl.cdiv(self.q_len, self.row_size)

    @property
    def tiles_per_head(self) -> int:
        return self.num_rows * self.subtiles

    @property
    def head_tiles(self) -> int:
        return self.num_q_heads // self.heads_per_tile

    @property
    def num_items(self) -> int:
        return self.batch_size * self.head_tiles * self.tiles_per_head

    @property
    def head_group(self) -> int:
        """Heads whose tiles are interleaved: as many as keep their K and V in the L2 cache together.

        All heads where the K and V of all fit; otherwise so many that part of the cache is left for Q and the output.
        Warpgroups that work apart read K and V twice as often, so their share of the cache is smaller. They get at
        least two K/V heads: one head has too few long rows for all workers to begin with.
        """
        kv_bytes = self.kv_len * (self.head_dim + self.v_head_dim) * 2
        share, least = (16 << 20, 2) if self.pairing is Pairing.APART else (32 << 20, 1)
        most = self.config.head_group or max(least, share // kv_bytes) * (self.group // self.heads_per_tile or 1)
        heads = self.batch_size * self.head_tiles
        if not self.config.head_group and self.batch_size * self.num_kv_heads * kv_bytes <= HOPPER_L2_BYTES:
            most = heads
        return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= most)

    @property
    def by_length(self) -> bool:
        """Whether the rows of a section come by length (`lists.work_order`), and not rank by rank of its heads.

        The queries of a chunk all have many keys before them. Rank by rank, the last rows of a head that looks broadly
        would keep a few workers busy when the others have nothing left to do. Where workers take many turns, the loss
        is small.
        """
        few_turns = self.persistent and self.num_items <= MOST_TURNS * self.num_workers
        left, right = self.elements.band
        is_chunk = left is None and right is not None and right > 0
        known = self.num_items + self.num_workers <= MOST_ITEMS
        return is_chunk and self.own_lists and self.head_group > 1 and few_turns and known

    @property
    def cuts_rows(self) -> bool:
        """Whether rows that are longer than a worker's share are cut into parts.

        Not with a bias: with one of -1e9, the lse is too coarse to weigh a part.
        """
        plain = not self.has_sinks and not self.has_bias and self.packing.group == 1
        all_heads = self.head_group == self.batch_size * self.num_q_heads
        return self.by_length and all_heads and self.subtiles == 1 and plain

    # -- steps ---------------------------------------------------------------------------------------------------------
    # A step is one tile of keys, made of `parts` runs of `unit` keys. A listed block is `units_per_block` runs.

    @property
    def plain_rules(self) -> bool:
        return not self.has_bias and not self.kv_vectors and not self.has_bits

    @property
    def tile_kv(self) -> int:
        """Keys per step. Only plain rules and bits of rows have tiles of several runs: other kernels would spill."""
        plain = self.plain_rules or (self.has_row_bits and not self.has_bias and not self.kv_vectors)
        return self.config.tile_kv if plain else math.gcd(self.config.tile_kv, self._consecutive)

    @property
    def unit(self) -> int:
        return math.gcd(self.tile_kv, self._consecutive)

    @property
    def _consecutive(self) -> int:
        """Keys of a listed block that follow one another in memory."""
        return math.gcd(self.block_kv, self.page or 0)

    @property
    def parts(self) -> int:
        return self.tile_kv // self.unit

    @property
    def units_per_block(self) -> int:
        return self.block_kv // self.unit

    @property
    def readers(self) -> int:
        """Compute warpgroups with notes of their own about the runs of a step: a run may be listed for one only."""
        return 2 if self.pairing is Pairing.UNION else 1

    @property
    def zeroes_padding(self) -> bool:
        """Whether values may lie beside padding, which holds anything in pages. Then a step is one run."""
        return self.page is not None and "kv_segments" in self.kv_vectors

    @property
    def stages(self) -> int:
        return self.config.stages

    @property
    def q_stages(self) -> int:
        return self.config.q_stages

    @property
    def testable(self) -> bool:
        """Whether a partial step leaves out the halves of its tile that no query can attend to."""
        return self.plain_rules and (self.elements.by_position or self.parts > 1 or self.ragged)

    @property
    def ragged(self) -> bool:
        """Whether the last block has keys past the end, and so perhaps tiles that are past the end as a whole."""
        return self.kv_len % self.block_kv != 0

    @property
    def separate_out(self) -> bool:
        return self.config.separate_out(self.head_dim, self.v_head_dim)

    @property
    def ahead(self) -> bool:
        """Whether the next tile's first logits are multiplied while this tile's output is written.

        Then every tile has a step: a tile that attends nothing gets a step without keys. Other calls would spill, and
        so would merged rows and the places of eight runs.
        """
        plain = self.plain_rules and not self.has_sinks and self.head_dim == self.v_head_dim
        plain = plain and self.pairing is not Pairing.UNION
        return self.persistent and self.separate_out and plain and self.parts <= 4

    # -- softmax -------------------------------------------------------------------------------------------------------

    @property
    def plain_logits(self) -> bool:
        return not self.has_bias and self.soft_cap is None and self.scale > 0

    @property
    def to_log2(self) -> float:
        """exp(logit) = exp2(x * to_log2). If nothing comes between product and softmax, x is the raw product, and the
        factor contains the scale.
        """
        return self.scale * LOG2E if self.plain_logits else LOG2E

    @property
    def trusts_maximum(self) -> bool:
        """Whether tiles of full blocks are weighed by the maximum of earlier tiles. Other calls would spill more."""
        return self.plain_logits and not self.has_bits and self.parts <= 4 and self.v_head_dim <= 128

    @property
    def lane_sums(self) -> bool:
        """Whether each thread keeps its own part of a row's sum, and the parts are added once per item.

        Only where there are registers for the parts, and where this was measured to be faster.
        """
        return not self.has_bias and self.v_head_dim in (64, 128)

    # -- shared memory -------------------------------------------------------------------------------------------------

    def smem_bytes(self) -> int:
        """Bytes of shared memory, with room in the ring for tiles as wide as the configuration says."""
        return smem_bytes([self.memory(self.config.tile_kv), self.barriers()])

    def memory(self, tile_kv: int | None = None) -> ForwardMemory:
        rows = self.compute_wgs, WG_ROWS
        ring = *self.rings, self.stages, tile_kv or self.tile_kv
        return ForwardMemory(
            q=swizzled((self.q_stages * self.compute_wgs, WG_ROWS, self.head_dim), self.dtype),
            k=swizzled((*ring, self.head_dim), self.dtype),
            v=swizzled((*ring, self.v_head_dim), self.dtype),
            out=swizzled((*rows, self.v_head_dim), self.dtype) if self.separate_out else None,
            lse=plgpu.SMEM(rows, jnp.float32),
            kv_vectors={name: plgpu.SMEM(ring, jnp.int32) for name in self.kv_vectors},
            notes=plgpu.SMEM(
                (*self.rings, 2 * PUBLISHED + self.stages * self.parts * (self.readers + self.has_bits) + 2), jnp.int32
            ),
        )

    def barriers(self) -> ForwardBarriers:
        consumers = self.compute_wgs // self.workers_per_cta
        queries, ring = self.q_stages * self.compute_wgs, (*self.rings, self.stages)
        return ForwardBarriers(
            item_ready=plgpu.Barrier(num_barriers=(*self.rings, 2)),
            item_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=(*self.rings, 2)),
            ticket_ready=plgpu.Barrier(num_barriers=(*self.rings, 1)),
            q_ready=plgpu.Barrier(num_arrivals=self.packing.pieces(WG_ROWS), num_barriers=queries),
            q_free=plgpu.Barrier(num_barriers=queries),
            k_ready=plgpu.Barrier(num_arrivals=self.parts * (1 + len(self.kv_vectors)), num_barriers=ring),
            k_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=ring),
            v_ready=plgpu.Barrier(num_arrivals=self.parts, num_barriers=ring),
            v_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=ring),
            tensor_core=plgpu.Barrier(num_arrivals=2) if self.take_turns else None,
            v_landed=plgpu.Barrier(num_barriers=(*self.rings, 1)) if self.zeroes_padding else None,
        )
