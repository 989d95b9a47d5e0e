"""Keys and values that lie in pages: tiles are read through a page table, and no page is copied."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from xsake._backend import Call
from xsake.kernels_xla_ref import block_sparse
from xsake.kernels_xla_ref.block_sparse import Config


class Pages(NamedTuple):
    """The cache of many sequences; page `table[b, i]` holds tokens i * page to (i + 1) * page of sequence b."""

    key: Float[Array, "P page K D"]
    value: Float[Array, "P page K Dv"]
    table: Int[Array, "B n"]

    @property
    def size(self) -> int:
        return self.key.shape[1]


def forward(call: Call, config: Config, pages: Pages) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
    """As `block_sparse.forward`; of the call's key and value only the shapes matter."""
    few = block_sparse.few_queries(call)
    run = call if few is None else few.call
    key, value = (_Tiles(run, config, x, pages.table) for x in (pages.key, pages.value))
    results = block_sparse.forward_of_tiles(run, config, (key, value))
    return results if few is None else few.results(*results)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Stands for the tiles [N, tkv, D] of a call's keys or values, and reads the chosen ones from their pages."""

    call: Call
    config: Config
    pages: Array
    table: Array

    def __getitem__(self, number: Int[Array, " C"]) -> Float[Array, "C tkv D"]:
        call, tile = self.call, self.config.forward.kv
        per_sequence = call.mask.num_kv_blocks * (call.mask.block_kv // tile)
        head, j = number // per_sequence, number % per_sequence
        batch, kv_head = head // call.kv_heads, head % call.kv_heads
        slot = j[:, None] * tile + jnp.arange(tile, dtype=jnp.int32)[None]
        # The last block may end past the last page: the element test leaves these slots out.
        slot = jnp.minimum(slot, call.kv_len - 1)
        size = self.pages.shape[1]
        page = jnp.clip(self.table[batch[:, None], slot // size], 0, self.pages.shape[0] - 1)
        x = self.pages[page, slot % size, kv_head[:, None]]
        if call.kv_segments is not None:
            # Padding may hold anything, NaN included; a weight of 0 times NaN would be NaN.
            x = jnp.where((call.kv_segments[batch[:, None], slot] >= 0)[..., None], x, 0)
        return x.astype(jnp.promote_types(call.query.dtype, jnp.float32))
