"""The mask's bitmaps cut into tiles, rows by lanes, with 32 rows in a word."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from xsake.backend.contract import Call
from xsake.hads.mask.bitmaps import pack, unpack
from xsake.kernels_pallas_tpu.tile.tiles import Axis


class BitTiles:
    """`tiles`: i32[b | 1, h | 1, n, row tiles of a block, lane tiles of a block, words, lanes]."""

    def __init__(self, call: Call, rows: Axis, lanes: Axis, *, transposed: bool):
        mask = call.mask
        bits = unpack(jnp, jnp.asarray(mask.bitmaps), mask.block_q, mask.block_kv)
        if transposed:
            bits = bits.swapaxes(-1, -2)
        bits = bits[..., : rows.pitch, : lanes.pitch]  # a sequence may be shorter than a block
        bits = jnp.pad(bits, [(0, 0)] * 3 + [(0, rows.pitch - bits.shape[-2]), (0, lanes.pitch - bits.shape[-1])])
        split = bits.reshape(*bits.shape[:3], rows.split, rows.tile, lanes.split, lanes.tile).swapaxes(4, 5)
        words = pack(jnp, split).swapaxes(-1, -2)
        self.tiles = lax.bitcast_convert_type(words, jnp.int32)
        self._rows, self._lanes = rows, lanes
        self._per_batch, self._per_head = (n > 1 for n in bits.shape[:2])
        self._heads, self._group = mask.heads, call.q_heads // mask.heads

    def pick(self, batch: Any, head: Any, row: Any, lane: Any, number: Any) -> tuple:
        """Indices of a query head's tile in `tiles`; `row` and `lane` number the tiles of the whole axes."""
        return (
            batch if self._per_batch else 0,
            lax.div(head, self._group) if self._per_head else 0,
            number,
            lax.rem(row, self._rows.split) if self._rows.split > 1 else 0,
            lax.rem(lane, self._lanes.split) if self._lanes.split > 1 else 0,
        )

    def read(self, buffer: Any, slot: Array, first: int, width: int, fold: int = 1) -> Array:
        """bool[fold * rows, width] of a pass that begins at token `first` of the buffer."""
        tile, count = self._lanes.tile, self._rows.tile
        entries = range(first // tile, -(-(first + width) // tile))
        parts = [buffer[slot, e] for e in entries]
        words = jnp.concatenate(parts, 1) if len(parts) > 1 else parts[0]
        if width < words.shape[1]:
            words = words[:, first % tile : first % tile + width]
        spread = [jnp.broadcast_to(words[w : w + 1], (min(32, count - 32 * w), width)) for w in range(words.shape[0])]
        x = jnp.concatenate(spread) if len(spread) > 1 else spread[0]
        row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
        x = lax.shift_right_logical(x, row & 31) & 1
        x = jnp.concatenate([x] * fold) if fold > 1 else x
        return x != 0
