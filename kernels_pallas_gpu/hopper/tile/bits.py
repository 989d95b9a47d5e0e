"""The mask's bitmaps inside the Hopper kernels: a word has the bits of 32 queries for one key.

A bitmap of a single word, as for tokens that choose blocks, stands in the lists in place of the bitmap's number.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing
from xsake.kernels_pallas_gpu.hopper.tile.vectors import WGMMA


def fits_in_lists(shape: tuple[int, ...]) -> bool:
    """Whether bitmaps of this shape are single words."""
    return shape[3:] == (1, 1)


class Bits(NamedTuple):
    """Arrays, or refs inside a kernel.

    `number` i32[b, h, N]: the bitmap of each slot of the lists, or its one word where there are no `words`.
    `words` i32[b | 1, h | 1, bitmaps, block_q / 32, block_kv | 1].
    """

    number: Any
    words: Any = None

    @classmethod
    def of(cls, bitmaps: Any, number: Any) -> "Bits | None":
        if bitmaps is None:
            return None
        words = lax.bitcast_convert_type(jnp.asarray(bitmaps), jnp.int32).swapaxes(3, 4)
        if not fits_in_lists(words.shape):
            return cls(number, words)
        lead = (jnp.arange(n) if n > 1 else jnp.zeros((1,), jnp.int32) for n in words.shape[:2])
        b, h = jnp.ix_(*lead)
        return cls(words[b[..., None], h[..., None], number, 0, 0])

    def of_slot(self, coords: tuple[Any, Any], slot: Any) -> Any:
        """The `number` that `tile` and `any` take. A slot past the last may be read: it belongs to no tile."""
        return self.number[(*coords, lax.min(slot, jnp.int32(self.number.shape[2] - 1)))]

    def any(self, number: Any, row: Any, packing: Packing) -> Any:
        """Whether any of 64 rows attends to a slot; None where `words` must tell. `row`: the first, in its block."""
        if self.words is not None:
            return None
        each = jnp.int32(-1 if packing.queries == 32 else (1 << packing.queries) - 1)
        return (lax.shift_right_logical(number, packing.first_query(row)) & each) != 0

    def tile(
        self,
        coords: tuple[Any, Any],
        number: Any,
        row: Any,
        kv_first: Any,
        shape: tuple[int, int],
        q_axis: int,
        packing: Packing,
    ) -> jax.Array:
        """bool[shape]: the bits of a tile. `row`, `kv_first`: its first row and key, counted in their blocks.

        `coords`: (batch, head) of the lists. `number` may be a tile itself where there are no `words`. Queries lie
        along `q_axis`, keys along the other axis.
        """
        query = packing.query(plgpu.broadcasted_iota(jnp.int32, shape, q_axis, layout=WGMMA))
        if packing.group > 1:  # the queries of a packed block fit in one word
            query, first, count = query + packing.first_query(row), 0, 1
        else:
            first, count = lax.div(row, jnp.int32(32)), shape[q_axis] // 32
        if self.words is None:
            words = [number if number.ndim else lax.broadcast_in_dim(number, shape, [])]
        else:
            lead = tuple(0 if size == 1 else at for at, size in zip(coords, self.words.shape[:2], strict=True))
            words = [self._of_keys((*lead, number, first + n), kv_first, shape, 1 - q_axis) for n in range(count)]
        word = words[0]
        for n, following in enumerate(words[1:], 1):
            word = jnp.where(query < 32 * n, word, following)
        return (lax.shift_right_logical(word, query & 31) & 1) != 0

    def _of_keys(self, at: tuple, kv_first: Any, shape: tuple[int, int], axis: int) -> jax.Array:
        if self.words.shape[4] == 1:
            return lax.broadcast_in_dim(self.words[(*at, 0)], shape, [])
        keys = self.words.at[(*at, pl.ds(kv_first, shape[axis]))]
        return lax.broadcast_in_dim(plgpu.load(keys, layout=WGMMA.reduce(1 - axis), optimized=False), shape, [axis])


class TileBits(NamedTuple):
    """The bits of a streamed tile, whose first row is number `row` of its block."""

    bits: Bits
    coords: tuple[Any, Any]
    number: Any
    row: Any
    packing: Packing

    def tile(self, rule: Any, row: int, kv_first: Any, shape: tuple[int, int], q_axis: int) -> jax.Array:
        """bool[shape], and `rule` where there is one."""
        bits = self.bits.tile(self.coords, self.number, self.row + row, kv_first, shape, q_axis, self.packing)
        return bits if rule is None else rule & bits

    def any(self, row: int) -> Any:
        return self.bits.any(self.number, self.row + row, self.packing)
