"""The runs of keys that a block of queries lists in a wide column (`lists.wide_columns`), inside the dK/dV kernel."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.kernels_pallas_gpu.hopper.tile.backward_config import ROWS
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing
from xsake.kernels_pallas_gpu.hopper.tile.vectors import ALONG_ROWS


class KeyRuns(NamedTuple):
    """In place of `Bits`, for a warpgroup with 64 of a column's `width` keys: those from 64 * `part` on.

    `number`: a ref to i32[b, h, N], for each slot of the lists a bit per run. `run`: keys per run.
    """

    number: Any
    run: int
    width: int
    part: Any

    def of_slot(self, coords: tuple[Any, Any], slot: Any) -> Any:
        """The bits of the warpgroup's runs. A slot past the last may be read: it belongs to no tile."""
        word = self.number[(*coords, lax.min(slot, jnp.int32(self.number.shape[2] - 1)))]
        if self.width == ROWS:
            return word
        runs = ROWS // self.run
        return lax.shift_right_logical(word, self.part * runs) & ((1 << runs) - 1)

    def any(self, number: Any, row: Any, packing: Packing) -> Any:
        """Whether any run is listed; None where every slot lists one."""
        return None if self.width == ROWS else number != 0

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
        """bool[shape], keys by queries: whether the key is in a listed run."""
        key = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=ALONG_ROWS)
        run = lax.shift_right_logical(key, jnp.full_like(key, self.run.bit_length() - 1))
        listed = lax.shift_right_logical(lax.broadcast_in_dim(number, key.shape, []), run) & 1
        return lax.broadcast_in_dim(listed, shape, [0]) != 0
