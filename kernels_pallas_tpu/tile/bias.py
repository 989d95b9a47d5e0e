"""A bias cut into tiles, rows by lanes; axes along which it is broadcast keep size 1."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from xsake.kernels_pallas_tpu.tile.element import spread
from xsake.kernels_pallas_tpu.tile.tiles import LANES, Axis


class BiasTiles:
    """`tiles`: [Bb, Hb, row tiles, lane tiles, rows, lanes], with 128 equal lanes where it is broadcast over them."""

    def __init__(self, bias: Array, rows: Axis, lanes: Axis, fold: int, *, transposed: bool):
        if transposed:
            bias = bias.swapaxes(2, 3)
        self.fold = fold
        self.per_batch, self.per_head, self.per_row, self.per_lane = (n > 1 for n in bias.shape)
        # A single row is no whole tile of bfloat16, and TPUs have no float16.
        if bias.dtype != jnp.bfloat16 or not self.per_row:
            bias = bias.astype(jnp.float32)
        x = rows.cut(bias, 2) if self.per_row else bias[:, :, None]
        x = lanes.cut(x, 4) if self.per_lane else jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], 1, LANES))
        self.tiles = x.swapaxes(3, 4)  # from [.., row tiles, rows, lane tiles, lanes]

    def pick(self, batch: Any, head: Any, row: Any, lane: Any) -> tuple:
        return (
            batch if self.per_batch else 0,
            pl.ds(head, self.fold) if self.per_head else pl.ds(0, 1),
            row if self.per_row else 0,
            lane if self.per_lane else 0,
        )

    def read(self, buffer: Any, slot: Array, entry: int, first: int, width: int) -> Array:
        """[rows or 1, width]: the bias of a pass that begins at token `first` of an entry of the buffer."""
        count = 1 if not self.per_lane else max(1, width // buffer.shape[-1])
        parts = []
        for e in range(entry, entry + count):
            x = buffer[slot, e]
            if self.per_lane and width < x.shape[-1]:
                x = x[..., first : first + width]
            x = x.astype(jnp.float32)
            x = x.reshape(-1, x.shape[-1])
            if not self.per_head and self.fold > 1 and self.per_row:
                x = jnp.concatenate([x] * self.fold)
            elif self.per_head and self.fold > 1 and not self.per_row:
                x = x[:, None, :]
            parts.append(x)
        x = jnp.concatenate(parts, -1) if len(parts) > 1 else parts[0]
        return x if self.per_lane else spread(x, width)
