"""Grid steps that own queries and walk keys: the forward and the dQ kernel."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from xsake.backend.contract import Call
from xsake.kernels_pallas_tpu.config import Tiling
from xsake.kernels_pallas_tpu.launch import Refs, grid_places
from xsake.kernels_pallas_tpu.tile.bias import BiasTiles
from xsake.kernels_pallas_tpu.tile.bits import BitTiles
from xsake.kernels_pallas_tpu.tile.element import (
    NEVER,
    Pair,
    Rule,
    Tokens,
    cut_lanes,
    lane_index,
    mark_dead,
    read_lanes,
    row_index,
)
from xsake.kernels_pallas_tpu.tile.pages import PagedTiles
from xsake.kernels_pallas_tpu.tile.tiles import LANES
from xsake.kernels_pallas_tpu.walk import Chunks, Walk
from xsake.kernels_pallas_tpu.work import lists_and_records


class QuerySteps:
    """Grid (batch, query heads / fold, tiles of queries)."""

    def __init__(self, call: Call, tiling: Tiling, rule: Rule):
        mask, q, kv, fold = call.mask, rule.q, rule.kv, tiling.fold
        group = call.q_heads // call.kv_heads
        if group % fold or (fold > 1 and mask.heads > call.kv_heads):
            raise ValueError(
                f"fold={fold} must divide the {group} query heads of a K/V head, which must share one mask list "
                f"(the mask has {mask.heads} heads)"
            )
        self.rule, self.tiling, self.fold = rule, tiling, fold
        self.grid = (call.batch, call.q_heads // fold, q.tiles)
        b, h, i = grid_places(*self.grid)
        self.pages = None if call.page is None else PagedTiles(call, kv)
        batch = mask.batch if self.pages is None else call.batch  # each sequence has pages of its own
        lists = [
            None if x is None else jnp.broadcast_to(jnp.asarray(x), (batch, *x.shape[1:]))
            for x in (mask.kv_indices, mask.kv_row_ptr, mask.kv_num_full, mask.kv_bitmap)
        ]
        self.work = lists_and_records(
            *lists,
            None if self.pages is None else self.pages.homes(lists[0]),
            rows=q,
            columns=kv,
            steps=(b * batch // call.batch, h * fold * mask.heads // call.q_heads, i),
        )
        exact = call.full_is_exact and kv.pitch == kv.block  # the element test removes padding inside a block
        self.chunks = Chunks(tiling.wide, tiling.narrow, kv.split, exact, tiling.mixed)
        self.bias = None if call.bias is None else BiasTiles(call.bias, q, kv, fold, transposed=False)
        self.bits = None if mask.bitmaps is None else BitTiles(call, q, kv, transposed=False)
        self._heads_per_kv_head = group // fold
        self.pair = Pair("key", "value")
        self.streams: dict[str, Any] = {
            **self._keys_and_values(call),
            "kv_tokens": (rule.kv_tokens(call), lambda ref, at, t, n: ref.at[at[0], t]) if rule.kv_rows else None,
            "bias": None
            if self.bias is None
            else (self.bias.tiles, lambda ref, at, t, n: ref.at[self.bias.pick(at[0], at[1] * fold, at[2], t)]),
            "bits": None
            if self.bits is None
            else (self.bits.tiles, lambda ref, at, t, n: ref.at[self.bits.pick(at[0], at[1] * fold, at[2], t, n[0])]),
        }
        self.q_tokens = None
        if rule.q_rows:
            tokens = rule.q_tokens(call)  # on the lanes; a step reads them on the sublanes, equal in all lanes
            tokens = jnp.broadcast_to(tokens[..., None], (*tokens.shape, LANES))
            self.q_tokens = (tokens, pl.BlockSpec((1, 1, rule.q_rows, q.tile, LANES), lambda b, h, i: (b, i, 0, 0, 0)))

    def _kv_head(self, place: Any) -> Any:
        return lax.div(place[1], self._heads_per_kv_head) if self._heads_per_kv_head > 1 else place[1]

    def _keys_and_values(self, call: Call) -> dict[str, Any]:
        kv, pages = self.rule.kv, self.pages
        if pages is None:
            return self.pair.streams(
                kv.cut_heads(call.key),
                kv.cut_heads(call.value),
                lambda ref, at, t, n: ref.at[at[0], self._kv_head(at), t],
            )

        def picker(value: bool) -> Any:
            def pick(ref: Any, at: Any, t: Any, n: Any) -> Any:
                return pages.pick(ref, pages.stored_head(self._kv_head(at), value=value), t, n[-1])

            return pick

        return {
            "key": (pages.operand(call.key), picker(False)),
            "value": (pages.operand(call.value), picker(True)),
        }

    def read(self, refs: Refs, ids: list[Array], second: bool, slot: Array, first: int, width: int) -> Array:
        """Keys, or values, on the sublanes, [width, dim]."""
        x = self.pair.read(refs, second, slot, first, width)
        pages = self.pages
        return x if pages is None else pages.own(x, pages.stored_head(self._kv_head(ids), value=second))

    def zero_padding(self, refs: Refs, slot: Array, tokens: Tokens, count: int) -> None:
        """In values from pages; elsewhere padding is 0."""
        if self.pages is not None and self.pages.has_padding:
            self.pages.zero_padding(refs.value_buffer, slot, tokens.kv_segment, count)

    def read_bias(self, refs: Refs, slot: Array, first: int, width: int) -> Array | None:
        if self.bias is None:
            return None
        entry = self.tiling.entry
        x = self.bias.read(refs.bias_buffer, slot, first // entry, first % entry, width)
        if x.ndim == 3:  # one row per head
            x = jnp.broadcast_to(x, (self.fold, self.rule.q.tile, width)).reshape(-1, width)
        return x

    def attends(self, refs: Refs, ids: list[Array], tokens: Tokens, slot: Array, first: int, width: int) -> Array:
        ok = self.rule.attends(self.q_vectors(refs, ids), cut_lanes(tokens, first, width))
        return ok if self.bits is None else ok & self.bits.read(refs.bits_buffer, slot, first, width, self.fold)

    def q_vectors(self, refs: Refs, ids: list[Array]) -> Tokens:
        def read(r: int) -> Array:
            x = refs.q_tokens[0, 0, r][:, :1]
            return jnp.concatenate([x] * self.fold) if self.fold > 1 else x

        return self.rule.q_vectors(lambda axis, fill: row_index(axis, ids[2], self.fold, fill), read)

    def kv_vectors(self, refs: Refs, walk: Walk, slot: Array, position: Array, count: int) -> Tokens:
        at = [position + e for e in range(count)]
        live = [walk.live(p) for p in at]

        tokens = self.rule.kv_vectors(
            lambda axis, fill: lane_index(axis, [walk.tile(p) for p in at], live, fill),
            lambda r: read_lanes(refs.kv_tokens_buffer, slot, r, 0, count * self.tiling.entry),
        )
        return tokens._replace(kv=mark_dead(tokens.kv, live, NEVER)) if self.rule.positions else tokens
