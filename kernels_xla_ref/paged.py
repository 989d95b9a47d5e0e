"""Keys and values that lie in pages: tiles are read through a page table, and no page is copied."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, UInt

from xsake.backend.contract import Call


@dataclasses.dataclass(frozen=True)
class PagedTiles:
    """Stands for the tiles [N, tile, D] of a call's keys or values, and reads the chosen ones from their pages."""

    call: Call
    tile: int
    pages: Float[Array, "P page K D"]
    value: bool

    def __post_init__(self) -> None:
        if self.pages.shape[1] % self.tile:
            raise ValueError(f"config: a tile of {self.tile} keys must divide the page of {self.pages.shape[1]} keys")

    def __getitem__(self, number: UInt[Array, " C"]) -> Float[Array, "C tile D"]:
        call, tile = self.call, self.tile
        assert call.page_table is not None
        per_sequence = call.mask.num_kv_blocks * (call.mask.block_kv // tile)
        head, j = number // per_sequence, number % per_sequence
        batch, kv_head = head // call.kv_heads, head % call.kv_heads
        slot = j[:, None] * tile + jnp.arange(tile, dtype=jnp.uint32)[None]
        # The last block may end past the last page: the element test leaves these slots out.
        slot = jnp.minimum(slot, call.kv_len - 1)
        size = self.pages.shape[1]
        page = jnp.clip(call.page_table[batch[:, None], slot // size], 0, self.pages.shape[0] - 1).astype(jnp.uint32)
        x = self.pages[page, slot % size, call.stored_head(kv_head, value=self.value)[:, None]]
        if call.kv_segments is not None:
            # Padding may hold anything, NaN included; a weight of 0 times NaN would be NaN.
            x = jnp.where((call.kv_segments[batch[:, None], slot] >= 0)[..., None], x, 0)
        return x.astype(np.promote_types(call.query.dtype, jnp.float32))
