"""Keys and values in pages: how transfers find a tile of one head, with no copy of the pages.

XLA keeps [pages, page, K, D] token by token where the rows of K heads fill tiles of the memory, and head by head
otherwise. Head by head, the rows of one head follow one another. Token by token, a transfer takes a head out of the
rows of every token: float32 heads one at a time, bfloat16 heads in pairs, whose numbers share words of 32 bits. The
kernel then keeps its half of every word.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Int

from xsake._ground.trace import interpreting
from xsake.backend.contract import Call
from xsake.kernels_pallas_tpu.tile.element import spread
from xsake.kernels_pallas_tpu.tile.tiles import LANES, Axis


def unsupported(call: Call) -> str | None:
    for name, dim in (("head_dim", call.head_dim), ("value_dim", call.value_dim)):
        if dim % LANES:
            return f"{name}={dim} must be a multiple of {LANES} with page_table: other pages would have to be copied"
    if call.query.dtype == jnp.float16:
        return "query.dtype=float16 must be bfloat16 or float32 with page_table: pages would have to be copied"
    page, block = call.key.shape[1], call.mask.block_kv
    if page % LANES:
        return f"page_table: the pages of {page} keys must be a multiple of {LANES}"
    if page % block or block % LANES:
        return f"mask.block_kv={block} must be a multiple of {LANES} that divides the page of {page} keys"
    return None


def in_pairs(call: Call) -> bool:
    """Whether transfers bring two heads."""
    return call.page is not None and call.query.dtype == jnp.bfloat16 and _by_tokens(call)


def _by_tokens(call: Call) -> bool:
    """How XLA for TPU keeps such arrays, by what it was seen to choose."""
    heads = call.key.shape[2]
    return heads % 8 == 0 or heads in ((2, 4) if call.query.dtype == jnp.bfloat16 else (1, 2, 4))


class PagedTiles:
    """What stands in the place of the tiles of keys and values of a call without pages."""

    def __init__(self, call: Call, kv: Axis):
        self._table, self._num_pages, self._kv = call.page_table, call.key.shape[0], kv
        self._per_page = call.key.shape[1] // kv.block
        self._by_tokens, self._pairs = _by_tokens(call), in_pairs(call)
        self._dtype, self.stored_head = call.query.dtype, call.stored_head
        self.has_padding = call.kv_segments is not None

    def homes(self, indices: Int[Array, "B h N"]) -> Int[Array, "B h N"]:
        """Where the blocks of a list lie: their numbers among the blocks of all pages."""
        table = jnp.clip(jnp.asarray(self._table), 0, self._num_pages - 1)
        block = jnp.clip(indices, 0, self._kv.blocks - 1)
        page = jax.vmap(lambda row, place: row[place])(table, block // self._per_page)
        return page * self._per_page + block % self._per_page

    def operand(self, pages: Array) -> Array:
        if not self._by_tokens:
            return pages.swapaxes(1, 2)
        return _words(pages) if self._pairs and interpreting() else pages

    def pick(self, ref: Any, head: Any, tile: Any, home: Any) -> Any:
        """A tile of one stored head, or of the pair that it is in."""
        kv, count = self._kv, self._per_page
        page, block = (home, 0) if count == 1 else (lax.div(home, count), lax.rem(home, count))
        row = block * kv.block + (lax.rem(tile, kv.split) * kv.tile if kv.split > 1 else 0)
        rows = pl.ds(row if isinstance(row, int) else pl.multiple_of(row, kv.tile), kv.tile)
        if not self._by_tokens:
            return ref.at[page, head, rows]
        if not self._pairs:
            return ref.at[page, rows, head]
        words = ref if interpreting() else ref.bitcast(jnp.uint32)
        return words.at[page, rows, head >> 1]

    def own(self, x: Array, head: Array) -> Array:
        """The numbers of one stored head, from what its transfers bring."""
        if not self._pairs:
            return x
        half = lax.shift_right_logical(x, jnp.full_like(x, 16 * (head & 1)))
        return lax.bitcast_convert_type(half << 16, jnp.float32).astype(self._dtype)

    def zero_padding(self, buffer: Any, slot: Array, segments: Array, count: int) -> None:
        """Zeroes the values of padding, segments [1, tokens] below 0: a weight of 0 times NaN would be NaN."""

        @pl.when(segments.min() < 0)
        def _() -> None:
            tile = self._kv.tile
            for e in range(count):
                holds = jnp.where(segments[:, e * tile : (e + 1) * tile] < 0, 0.0, 1.0)
                rows = spread(jnp.broadcast_to(holds, (LANES, tile)).T, buffer.shape[-1])
                x = buffer[slot, e]
                buffer[slot, e] = jnp.where(rows > 0, x, jnp.zeros_like(x))


def _words(pages: Array) -> Array:
    """What `ref.bitcast(jnp.uint32)` gives, for the interpreter, which does not have it."""
    *rest, heads, dim = pages.shape
    return lax.bitcast_convert_type(pages.reshape(*rest, heads // 2, 2, dim).swapaxes(-1, -2), jnp.uint32)
