"""How the gradient kernels for Hopper cut a call: facts known while tracing, and who holds which rows."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu import limits
from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS, BackwardConfig
from xsake.kernels_pallas_gpu.hopper.tile.element_rule import ElementRule
from xsake.kernels_pallas_gpu.hopper.tile.launch import smem_bytes
from xsake.kernels_pallas_gpu.hopper.tile.logits import LogitRule
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing
from xsake.kernels_pallas_gpu.hopper.tile.row_lists import ListRefs
from xsake.kernels_pallas_gpu.hopper.work.parts import Columns
from xsake.kernels_pallas_gpu.hopper.work.turns import Turns
from xsake.kernels_pallas_gpu.limits import HOPPER_SHARED_MEMORY, hopper_sms

L2_SHARE = 32 * 2**20  # bytes: the tiles that CTAs stream at one time should fit in this part of the L2 cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardPlan:
    """All that a gradient kernel knows of a call while tracing. A pair: a batch entry and a head of the held rows."""

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
    def of_call(call: Call, *, holds_keys: bool = True) -> dict[str, Any]:
        """All fields but `interpret`."""
        bias, block_q, ragged = call.bias, call.mask.block_q, call.kv_len % call.mask.block_kv != 0
        rule = LogitRule(
            scale=call.scale,
            soft_cap=call.soft_cap,
            has_bias=bias is not None,
            rows_share_bias=holds_keys and bias is not None and bias.shape[2] == 1 and call.q_len % block_q != 0,
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
            # The store drops keys past the end that a CTA holds; in dQ such keys may be in a tile of the last block.
            elements=ElementRule(
                band=call.band,
                kv_len=call.kv_len if ragged and not holds_keys else None,
                q_axis=int(holds_keys),
                any_position=call.q_positions is not None,
            ),
            rule=rule,
            full_is_exact=call.full_is_exact,
            has_bias=bias is not None,
        )

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def held_heads(self) -> int:
        return self.num_kv_heads

    @property
    def pairs(self) -> int:
        return self.batch_size * self.held_heads

    @property
    def simulate(self) -> bool:
        return bool(self.interpret)

    @property
    def q_size(self) -> int:
        return pl.cdiv(self.q_len, self.block_q) * self.block_q

    @property
    def kv_size(self) -> int:
        return pl.cdiv(self.kv_len, self.block_kv) * self.block_kv

    def memory(self) -> NamedTuple:
        raise NotImplementedError

    def barriers(self) -> NamedTuple:
        raise NotImplementedError

    def shared(self) -> list[Any]:
        """The scratch types of the kernel."""
        return [self.memory(), self.barriers()]

    def smem_bytes(self) -> int:
        """Bytes of shared memory on a GPU, also where the kernel is interpreted."""
        return smem_bytes(dataclasses.replace(self, interpret=False).shared())


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkGrid:
    """Which resident rows each ring of a CTA works on, item by item.

    A CTA has one ring, whose rows all its compute warpgroups share, or one ring per compute warpgroup. Items are
    numbered section by section, and inside a section rank by rank: the longest rows of all its pairs come first. The
    longest of all pairs, a column for a sink for instance, may come before all sections, cut into parts
    (`work.parts`).
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


class StreamBarriers(NamedTuple):
    """`outer`: of the ring that is read first and last in a step; `inner`: of the other ring."""

    resident: Any
    outer_ready: Any
    inner_ready: Any
    outer_free: Any
    inner_free: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingPlan(BackwardPlan):
    """The plan of a kernel whose CTAs take items by turns (`work.streaming`). Packed heads count as one.

    has_bits: whether the mask has bitmaps.
    """

    packing: Packing
    has_bits: bool
    config: BackwardConfig

    FIELDS: ClassVar[tuple[int, int]]  # numbers that are published of an item: for all rings, and for each

    @property
    def tile(self) -> int:
        return self.config.tile

    @property
    def compute_wgs(self) -> int:
        return self.config.compute_wgs

    @property
    def work(self) -> WorkGrid:
        raise NotImplementedError

    @property
    def split(self) -> bool:
        """Whether two warpgroups share the rows of one."""
        return False

    @property
    def streamed_block(self) -> int:
        """Rows of the blocks whose tiles are streamed."""
        raise NotImplementedError

    @property
    def gathers(self) -> bool:
        """Whether a tile has runs of several blocks."""
        return False

    @property
    def missing(self) -> int:
        """The first row of a run that does not exist, past all rows."""
        raise NotImplementedError

    @property
    def one_stage(self) -> bool:
        """Whether the resident rows of the next item cannot be loaded ahead."""
        raise NotImplementedError

    @property
    def ahead(self) -> bool:
        """Whether the memory warpgroup loads the resident rows of the next item ahead: by default, where they fit."""
        if self.one_stage or self.config.resident_stages is not None:
            return not self.one_stage and self.config.resident_stages == 2
        two = dataclasses.replace(self.config, resident_stages=2)
        return dataclasses.replace(self, config=two).smem_bytes() <= HOPPER_SHARED_MEMORY

    def shared(self) -> list[Any]:
        return [*super().shared(), self.turns.memory()]

    def misfit(self) -> str | None:
        """Why the configuration cannot serve the call, or None."""
        if self.streamed_block % self.tile and not self.gathers:
            return f"tile={self.tile} does not divide the mask's block of {self.streamed_block}"
        if self.split and (self.compute_wgs != 2 or self.tile != ROWS):
            return f"head dims {self.head_dim} and {self.v_head_dim} need compute_wgs=2 and tile={ROWS}"
        if self.one_stage and self.config.resident_stages == 2:
            return "this call needs resident_stages=1"
        return limits.misfit(self.smem_bytes())

    @property
    def turns(self) -> Turns:
        work, (of_all, of_each) = self.work, self.FIELDS
        return Turns(
            items=work.items,
            fields=of_all + of_each * work.rings,
            ahead=self.ahead,
            compute_wgs=self.compute_wgs,
            interpret=self.simulate,
        )

    @property
    def rings(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(rings, stages) of the outer and of the inner ring."""
        rings = self.work.rings
        return (rings, self.config.stages), (rings, self.config.inner_stages)

    def simulated(self, *accumulators: tuple[int, int]) -> list[Any]:
        """Float32 accumulators of every compute warpgroup, if the kernel is interpreted."""
        return [plgpu.SMEM((self.compute_wgs, *s), jnp.float32) for s in accumulators if self.simulate]

    def barriers_of(self, *, resident: int, outer: int, inner: int) -> StreamBarriers:
        """Barriers for the resident rows and both rings; the arguments are copies per tile."""
        outer_ring, inner_ring = self.rings
        readers = self.compute_wgs // self.work.rings
        return StreamBarriers(
            resident=plgpu.Barrier(num_arrivals=resident, num_barriers=(1 + self.ahead) * self.compute_wgs),
            outer_ready=plgpu.Barrier(num_arrivals=outer, num_barriers=outer_ring),
            inner_ready=plgpu.Barrier(num_arrivals=inner, num_barriers=inner_ring),
            outer_free=plgpu.Barrier(num_arrivals=readers, num_barriers=outer_ring),
            inner_free=plgpu.Barrier(num_arrivals=readers, num_barriers=inner_ring),
        )


def active_keys(call: Call) -> float:
    """Keys that a query attends to on average, by the mask's density; half of them where the call is causal."""
    density = call.mask.most_density if call.mask.density_hint is None else call.mask.density_hint
    return density * call.kv_len * (0.5 if call.band.right == 0 else 1.0)


def longest_share(call: Call) -> float:
    """The work of a column of 128 keys that every query lists, over one SM's share of all work."""
    columns = call.batch * call.kv_heads * max(active_keys(call), 1.0) / (2 * ROWS)  # of such a length
    return hopper_sms() / columns


def early_ranks(pairs: int) -> int:
    """Ranks that come before all sections: about as many CTAs as half of the chip runs at a time."""
    return max(1, hopper_sms() // 2 // pairs)
