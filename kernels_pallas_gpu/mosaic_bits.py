"""The mask's bitmaps inside the Hopper kernels: a word holds 32 queries of one key, and is read where it is needed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.mosaic_packing import Packing

WGMMA = plgpu.Layout.WGMMA


class Bits(NamedTuple):
    """As arrays, or as refs inside a kernel: `number` i32[b, h, N], the bitmap of each slot of the lists, and `words`
    i32[b | 1, h | 1, bitmaps, block_q / 32, block_kv | 1].
    """

    number: Any
    words: Any

    @classmethod
    def of(cls, bitmaps: Any, number: Any) -> "Bits | None":
        if bitmaps is None:
            return None
        return cls(number, lax.bitcast_convert_type(jnp.asarray(bitmaps), jnp.int32).swapaxes(3, 4))

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
        """bool[shape] of a tile whose first row and key are number `row` and `kv_first` of their blocks.

        `coords` is the (batch, head) of the lists. Queries lie along `q_axis`, keys along the other.
        """
        lead = tuple(0 if size == 1 else at for at, size in zip(coords, self.words.shape[:2], strict=True))
        query = packing.query(plgpu.broadcasted_iota(jnp.int32, shape, q_axis, layout=WGMMA))
        if packing.group > 1:  # the queries of a packed block fit in one word
            query, first, count = query + packing.first_query(row), 0, 1
        else:
            first, count = lax.div(row, jnp.int32(32)), shape[q_axis] // 32
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
