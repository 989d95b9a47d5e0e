"""Sequence axes cut into tiles, so that a kernel addresses a tile by its number alone."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

LANES = 128


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


@dataclasses.dataclass(frozen=True)
class Axis:
    """One sequence axis. Each mask block of `block` tokens takes `pitch` rows, which are cut into tiles of `tile` rows.

    `pitch` differs from `block` only where the hardware's alignment needs padding inside the blocks, or where the whole
    sequence is shorter than one block.
    """

    length: int
    block: int
    pitch: int
    tile: int

    @property
    def split(self) -> int:
        """Tiles per mask block."""
        return self.pitch // self.tile

    @property
    def blocks(self) -> int:
        return -(-self.length // self.block)

    @property
    def tiles(self) -> int:
        """Tiles of the whole axis. Without padding inside blocks, tiles past the end of the sequence are left out."""
        if self.pitch == self.block or self.blocks == 1:
            return -(-self.length // self.tile)
        return self.blocks * self.split

    @property
    def padded(self) -> bool:
        return self.tiles * self.tile != self.length

    def cut(self, x: Array, axis: int, fill: float | int = 0) -> Array:
        """From [..., length, ...] to [..., tiles, tile, ...], with `fill` in the padding."""
        axis %= x.ndim

        def pad(x: Array, at: int, size: int) -> Array:
            widths = [(0, 0)] * x.ndim
            widths[at] = (0, size - x.shape[at])
            return jnp.pad(x, widths, constant_values=fill) if size != x.shape[at] else x

        if self.pitch != self.block and self.blocks > 1:
            x = pad(x, axis, self.blocks * self.block)
            x = x.reshape(*x.shape[:axis], self.blocks, self.block, *x.shape[axis + 1 :])
            x = pad(x, axis + 1, self.pitch)
            return x.reshape(*x.shape[:axis], self.tiles, self.tile, *x.shape[axis + 2 :])
        x = pad(x, axis, self.tiles * self.tile)
        return x.reshape(*x.shape[:axis], self.tiles, self.tile, *x.shape[axis + 1 :])

    def uncut(self, x: Array, axis: int) -> Array:
        """From [..., tiles, tile, ...] to [..., length, ...]; `axis` is the axis of the tiles."""
        axis %= x.ndim
        if self.pitch != self.block and self.blocks > 1:
            x = x.reshape(*x.shape[:axis], self.blocks, self.pitch, *x.shape[axis + 2 :])
            x = x[(slice(None),) * (axis + 1) + (slice(self.block),)]
            x = x.reshape(*x.shape[:axis], self.blocks * self.block, *x.shape[axis + 2 :])
        else:
            x = x.reshape(*x.shape[:axis], self.tiles * self.tile, *x.shape[axis + 2 :])
        return x[(slice(None),) * axis + (slice(self.length),)]

    def cut_heads(self, x: Array) -> Array:
        """From [B, length, heads, D] to [B, heads, tiles, tile, D]."""
        return self.cut(x.swapaxes(1, 2), 2)

    def uncut_heads(self, x: Array) -> Array:
        return self.uncut(x, 2).swapaxes(1, 2)


def pitch_of(block: int, length: int, unit: int) -> int:
    """Rows that a mask block takes: a multiple of `unit`, and no longer than the sequence needs."""
    return round_up(min(block, length), unit) if length <= block else round_up(block, unit)


def tile_of(pitch: int, limit: int, unit: int) -> int:
    """The largest tile that divides the pitch, is a multiple of the unit and is at most the limit."""
    unit = math.gcd(unit, pitch)
    return max((t for t in range(unit, min(pitch, max(limit, unit)) + 1, unit) if pitch % t == 0), default=unit)
