"""Tile sizes of the kernels: their checks, the default for a call, and the search space for tuning."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax.numpy as jnp

from xsake._ground.fields import check_fields, flag, whole
from xsake.backend.contract import Call
from xsake.kernels_pallas_tpu.tile.pages import in_pairs
from xsake.kernels_pallas_tpu.tile.tiles import LANES, Axis, pitch_of, round_up, tile_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """How one kernel is tiled.

    Args:
      own: tokens that a grid step owns (queries, or keys for dK/dV); must divide the mask block's rows.
      entry: tokens of the other side that one transfer brings; must divide its mask block's rows.
      wide, narrow: transfers per chunk of full blocks, and per chunk of the blocks that are left.
      compute: tokens of the other side in one pass of matrix products; a chunk is cut into passes of at most this many.
      fold: query heads that share a step, where they share the mask's list and the K/V head.
      mixed: wide chunks test every element and take any block: for short blocks, where full blocks rarely fill a chunk.
    """

    own: int = whole(1, 2**20)
    entry: int = whole(1, 2**20)
    wide: int = whole(1, 2**20)
    narrow: int = whole(1, 2**20)
    compute: int = whole(1, 2**20)
    fold: int = whole(1, 2**20, default=1)
    mixed: bool = flag(default=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.mixed and self.narrow < self.wide < 2 * self.narrow:
            raise ValueError(f"mixed needs wide={self.wide} to be narrow={self.narrow} or at least twice that")
        if self.wide < self.narrow:
            raise ValueError(f"wide={self.wide} must be at least narrow={self.narrow}")
        for name in ("wide", "narrow"):
            if getattr(self, name) * self.entry % LANES and getattr(self, name) * self.entry > LANES:
                raise ValueError(f"{name} * entry = {getattr(self, name) * self.entry} must be a multiple of {LANES}")

    def passes(self, count: int) -> list[tuple[int, int]]:
        """(first token, tokens) of every pass over a chunk of `count` transfers."""
        width = count * self.entry
        if self.compute >= self.entry:
            size = self.compute // self.entry * self.entry
        else:
            size = self.compute if self.entry % self.compute == 0 else self.entry
        return [(a, min(size, width - a)) for a in range(0, width, size)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Independent tilings of the forward, the dQ and the dK/dV kernel."""

    forward: Tiling
    dq: Tiling
    dkv: Tiling

    def __post_init__(self) -> None:
        check_fields(self)


def sublanes(call: Call) -> int:
    """Rows of a hardware tile: 16 for bfloat16, 8 for float32."""
    return 16 if call.query.dtype == jnp.bfloat16 else 8


def lane_streams(call: Call) -> bool:
    """Whether an array with keys on the lanes is streamed beside K and V: segments, positions, a bias or bitmaps."""
    return (
        call.q_segments is not None
        or call.mask.bitmaps is not None
        or call.q_positions is not None
        or (call.bias is not None and call.bias.shape[3] > 1)
    )


def forward_axes(call: Call, tiling: Tiling) -> tuple[Axis, Axis]:
    """(q, kv): a grid step owns queries, and keys are streamed."""
    return _q_axis(call, "own", tiling.own, sublanes(call)), _kv_axis(call, "entry", tiling.entry, _kv_pitch(call))


def dq_axes(call: Call, tiling: Tiling) -> tuple[Axis, Axis]:
    return _q_axis(call, "own", tiling.own, LANES), _kv_axis(call, "entry", tiling.entry, _kv_pitch(call))


def dkv_axes(call: Call, tiling: Tiling) -> tuple[Axis, Axis]:
    """(q, kv): a grid step owns keys; queries are streamed, with their statistics on the lanes."""
    pitch = pitch_of(call.mask.block_kv, call.kv_len, LANES)
    return _q_axis(call, "entry", tiling.entry, LANES), _kv_axis(call, "own", tiling.own, pitch)


def _q_axis(call: Call, name: str, tile: int, unit: int) -> Axis:
    pitch = pitch_of(call.mask.block_q, call.q_len, unit)
    _check_tile(name, tile, pitch, unit, call.mask.block_q)
    return Axis(call.q_len, call.mask.block_q, pitch, tile)


def _kv_axis(call: Call, name: str, tile: int, pitch: int) -> Axis:
    _check_tile(name, tile, pitch, min(pitch, LANES), call.mask.block_kv)
    return Axis(call.kv_len, call.mask.block_kv, pitch, tile)


def _check_tile(name: str, tile: int, pitch: int, unit: int, block: int) -> None:
    if pitch % tile or tile % unit:
        raise ValueError(
            f"{name}={tile} must divide {pitch}, the rows of a mask block of {block}, and be a multiple of {unit}"
        )


def _kv_pitch(call: Call) -> int:
    """Rows that a block of keys takes: short blocks lie side by side where only K and V are streamed, and are padded to
    the lanes otherwise.
    """
    block = call.mask.block_kv
    if LANES % block == 0 and block >= sublanes(call) and not lane_streams(call) and call.kv_len > block:
        return block
    return pitch_of(block, call.kv_len, LANES)


def _fold(call: Call) -> int:
    """Query heads that may share a step: those of one K/V head, where they share a list too."""
    group = call.q_heads // call.kv_heads
    return group if call.mask.heads <= call.kv_heads else 1


def _divisor(n: int, limit: int) -> int:
    return max(d for d in range(1, max(1, min(n, limit)) + 1) if n % d == 0)


def _tiling(own: int, entry: int, entries: int, *, wide: int, narrow: int = 512, fold: int = 1) -> Tiling:
    """A tiling with `wide` and `narrow` in tokens: both are rounded to whole entries and whole lanes, and are at most
    the `entries` of a row.
    """
    unit = max(1, LANES // entry)
    most = min(32, max(unit, round_up(entries, unit)))
    small = min(most, round_up(max(1, narrow // entry), unit))
    large = max(small, min(most, round_up(max(1, wide // entry), unit)))
    if large < 2 * small:
        large = small
    # The full blocks of a row rarely fill a chunk of short blocks, and the element test costs only 3 per cent.
    mixed = small > 1
    return Tiling(
        own=own,
        entry=entry,
        wide=large,
        narrow=small,
        compute=512 if own * fold >= 512 else 2048,
        fold=fold,
        mixed=mixed,
    )


def default_config(call: Call) -> Config:
    """Steps of 512 queries (1024 where the mask's blocks are that long) and chunks of about 512 x 1024 logits.

    Cycles per 512 x 512 logits in the inner loop, from benchmarks/tpu/schedule.py (v5e, head_dim 128):

        entries of 512 per chunk     forward   dQ     dK/dV
        1                            1259      1735   2247
        2                            1186      1638   2149
        4                            1128      (few rows have so many entries)

    Blocks of 128 in chunks of 8, 16, 32 take 1764, 1559, 1398: every chunk waits once for the latency of its products.
    """
    return Config(forward=_forward(call), dq=_dq(call), dkv=_dkv(call))


def _row_tokens(call: Call, block: int) -> int:
    """Keys (or queries) of an average row. The lists are traced, so that their capacity stands for their length."""
    return call.mask.capacity // max(1, call.mask.num_q_blocks) * block


def _wide(call: Call, rows: int, block: int) -> int:
    """Tokens per wide chunk: 512 x 1024 logits, or twice as many where rows of short blocks are long enough."""
    tokens = min(2048, 512 * 1024 // rows)
    return 2 * tokens if rows < 512 and _row_tokens(call, block) >= 4 * tokens else tokens


def _entries(blocks: int, pitch: int, entry: int) -> int:
    return blocks * (pitch // entry)


def _forward(call: Call, limit: int = 1024, scale: float = 1.0) -> Tiling:
    q, kv = pitch_of(call.mask.block_q, call.q_len, sublanes(call)), _kv_pitch(call)
    own = tile_of(q, limit if q % 1024 == 0 else min(limit, 512), sublanes(call))
    entry = tile_of(kv, 1024, min(LANES, kv))
    fold = _divisor(_fold(call), max(1, 512 // own))
    wide = _wide(call, own * fold, call.mask.block_kv)
    return _tiling(own, entry, _entries(call.mask.num_kv_blocks, kv, entry), fold=fold, wide=int(wide * scale))


def _dq(call: Call, limit: int = 512, scale: float = 1.0) -> Tiling:
    q, kv = pitch_of(call.mask.block_q, call.q_len, LANES), _kv_pitch(call)
    own, entry = tile_of(q, limit, LANES), tile_of(kv, 512, min(LANES, kv))
    fold = _divisor(_fold(call), max(1, 512 // own))
    wide = min(2048, 512 * 1024 // (own * fold))
    return _tiling(own, entry, _entries(call.mask.num_kv_blocks, kv, entry), fold=fold, wide=int(wide * scale))


def _dkv(call: Call, limit: int = 512, scale: float = 1.0) -> Tiling:
    q, kv = pitch_of(call.mask.block_q, call.q_len, LANES), pitch_of(call.mask.block_kv, call.kv_len, LANES)
    own, entry = tile_of(kv, limit, LANES), tile_of(q, 512, LANES)
    wide = min(2048, 512 * 1024 // own)
    return _tiling(own, entry, _entries(call.mask.num_q_blocks, q, entry), wide=int(wide * scale))


def search_space(call: Call) -> Sequence[Config]:
    """The default, and changes of one kernel at a time: chunks half and twice as long, shorter steps, `mixed` the other
    way, other `fold`s.
    """
    default = default_config(call)
    out = [default]

    def consider(**change: Tiling) -> None:
        new = dataclasses.replace(default, **change)
        if new not in out and all(fits(call, name, getattr(new, name)) for name in change):
            out.append(new)

    for name, make in (("forward", _forward), ("dq", _dq), ("dkv", _dkv)):
        base = getattr(default, name)
        for limit, scale in itertools.product((1024, 512, 256), (0.5, 1.0, 2.0)):
            consider(**{name: make(call, limit, scale)})
        if base.wide != base.narrow or base.narrow > 1:
            consider(**{name: dataclasses.replace(base, mixed=not base.mixed)})
        for fold in (1, 2, 4, 8):
            if name != "dkv" and _fold(call) % fold == 0 and fold * base.own <= 1024:
                consider(**{name: dataclasses.replace(base, fold=fold)})
    return out


def misfit(call: Call, config: Config) -> str | None:
    for name, axes in (("forward", forward_axes), ("dq", dq_axes), ("dkv", dkv_axes)):
        tiling = getattr(config, name)
        try:
            axes(call, tiling)
        except ValueError as error:
            return f"{name}: {error}"
        if _fold(call) % tiling.fold:
            return f"{name}: fold={tiling.fold} must divide {_fold(call)}, the heads that may share a step"
        if not fits(call, name, tiling):
            return f"{name}: it needs {vmem_bytes(call, name, tiling)} bytes of VMEM; {VMEM_LIMIT} are the limit"
    return None


VMEM_LIMIT = 48 * 2**20  # bytes per kernel; v5e and v6e have 128 MiB in all, v5p and tpu7x 64 MiB


def vmem_bytes(call: Call, name: str, tiling: Tiling) -> int:
    """An upper bound of the VMEM that a kernel takes."""
    item = 2 if call.query.dtype == jnp.bfloat16 else 4
    dims = round_up(call.head_dim, LANES) + round_up(call.value_dim, LANES)
    rows, chunk = tiling.own * tiling.fold, tiling.wide * tiling.entry
    width = max(n for _, n in tiling.passes(tiling.wide))
    gathered = 2 * chunk * (dims * (4 if in_pairs(call) else item) + 8 * 4 * 2)
    if call.bias is not None:
        gathered += 2 * chunk * 4 * (rows if call.bias.shape[2] > 1 or name == "dkv" else 8)
    if call.mask.bitmaps is not None:
        gathered += 2 * chunk * 4 * round_up(-(-tiling.own // 32), 8)
    blocks = 2 * 2 * rows * dims * item
    if call.q_segments is not None or call.q_positions is not None:
        blocks += 2 * 3 * rows * LANES * 4
    scratch = rows * 4 * (dims + 2 * LANES)
    values = (4 if name == "forward" else 6) * rows * width * 4
    return gathered + blocks + scratch + values


def fits(call: Call, name: str, tiling: Tiling) -> bool:
    return vmem_bytes(call, name, tiling) <= VMEM_LIMIT
