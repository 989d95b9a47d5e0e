"""What is known of a call while tracing, under one tiling: a constant of the compiled kernels."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from xsake.backend.contract import Call
from xsake._ground.fields import check_fields, one_of, whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """How one kernel is tiled.

    Args:
      rows: rows of a tile: the queries of the heads that share a list.
      kv: keys of a tile; they must divide the mask's block_kv.
      num_warps: warps per program.
      num_stages: depth of the pipeline.
    """

    rows: int = one_of(16, 32, 64, 128)
    kv: int = one_of(16, 32, 64, 128)
    num_warps: int = one_of(1, 2, 4, 8, 16)
    num_stages: int = whole(1, 8)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Heads that share a list and K/V are a `pack`; a block of queries has `parts` tiles of `rows` rows."""

    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    group: int
    pack: int
    packs: int
    packs_per_kv_head: int
    head_dim: int
    value_dim: int
    width: int
    width_v: int
    block_q: int
    block_kv: int
    q_blocks: int
    kv_blocks: int
    rows: int
    parts: int
    q_tiles: int
    tile: int
    split: int
    kv_tiles: int
    mask_batch: int
    mask_heads: int
    capacity: int
    has_order: bool
    full_is_exact: bool
    has_bits: bool
    columns: int
    words: int
    table_size: int
    table_batch: int
    table_heads: int
    has_segments: bool
    has_sink: bool
    sink_batch: int
    left: int | None
    right: int | None
    scale: float
    natural: bool  # logits in natural units: float32, where a change of base would round them once more
    one: float  # a natural logit of 1 in the kernel's units

    @classmethod
    def of(cls, call: Call, tiling: Tiling, *, has_order: bool) -> Facts:
        mask, pack = call.mask, pack_of(call)
        if mask.block_kv % tiling.kv:
            raise ValueError(f"kv={tiling.kv} of the tiling must divide the mask's block_kv={mask.block_kv}")
        parts, split = -(-mask.block_q * pack // tiling.rows), mask.block_kv // tiling.kv
        b, h, count, columns, words = (1, 1, 1, 1, 1) if mask.bitmaps is None else mask.bitmaps.shape
        natural = call.query.dtype == jnp.float32
        return cls(
            q_len=call.q_len,
            kv_len=call.kv_len,
            q_heads=call.q_heads,
            kv_heads=call.kv_heads,
            group=call.q_heads // call.kv_heads,
            pack=pack,
            packs=call.q_heads // pack,
            packs_per_kv_head=call.q_heads // call.kv_heads // pack,
            head_dim=call.head_dim,
            value_dim=call.value_dim,
            width=padded(call.head_dim),
            width_v=padded(call.value_dim),
            block_q=mask.block_q,
            block_kv=mask.block_kv,
            q_blocks=mask.num_q_blocks,
            kv_blocks=mask.num_kv_blocks,
            rows=tiling.rows,
            parts=parts,
            q_tiles=mask.num_q_blocks * parts,
            tile=tiling.kv,
            split=split,
            kv_tiles=mask.num_kv_blocks * split,
            mask_batch=mask.batch,
            mask_heads=mask.heads,
            capacity=mask.capacity,
            has_order=has_order,
            full_is_exact=call.full_is_exact,
            has_bits=mask.bitmaps is not None,
            columns=columns,
            words=words,
            table_size=count * columns * words,
            table_batch=b,
            table_heads=h,
            has_segments=call.q_segments is not None,
            has_sink=call.sink_lse is not None,
            sink_batch=1 if call.sink_lse is None else call.sink_lse.shape[0],
            left=call.band.left,
            right=call.band.right,
            scale=float(call.scale),
            natural=natural,
            one=1.0 if natural else math.log2(math.e),
        )


def pack_of(call: Call) -> int:
    """Query heads that share a list and a K/V head."""
    return call.q_heads // max(call.kv_heads, call.mask.heads)


def padded(dim: int) -> int:
    """The size in a kernel of a head dimension: a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())
