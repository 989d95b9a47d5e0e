"""Few queries and many keys, as in decoding: one mask row is cut into parts that the whole chip computes side by side.

The rows of a part are all queries of all heads that share a K/V head and the mask; every part has the same rows, and
its share of the blocks that the mask row lists. The parts' outputs are merged by their lse. To a kernel this is a call
with one query head per K/V head and one mask row per part. Only queries are copied, and they are few.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from xsake._rewrites.rewrite import Rewrite
from xsake._rewrites.rows import in_rows
from xsake.backend.contract import Call

MOST_QUERIES = 8
KEYS_PER_PART = 512  # at least: fewer would not pay for the merge


@dataclasses.dataclass(frozen=True)
class RowParts:
    """How a mask row is cut: `group` query heads share its rows, and a part has `rows` rows, group * T of them used."""

    group: int
    rows: int
    parts: int

    @classmethod
    def of(cls, call: Call, *, workers: int, least_rows: int) -> RowParts | None:
        """None where the call has too many queries, or arguments that rows of several heads cannot share."""
        mask = call.mask
        if call.q_len > MOST_QUERIES or mask.num_q_blocks > 1 or call.bias is not None or mask.bitmaps is not None:
            return None
        if not isinstance(call.batch, int):
            return None
        group = call.q_heads // call.kv_heads if mask.heads in (1, call.kv_heads) else 1
        rows = -(-group * call.q_len // least_rows) * least_rows
        items = call.batch * call.q_heads // group
        most = -(-mask.capacity * mask.block_kv // KEYS_PER_PART)
        return cls(group, rows, max(1, min(workers // items, most)))


class FewQueries(Rewrite):
    """Forward only. Sinks are added to the results."""

    def __init__(self, given: Call, parts: RowParts) -> None:
        super().__init__(given)
        self.parts = parts

    @classmethod
    def of(cls, call: Call, *, workers: int, least_rows: int) -> FewQueries | None:
        parts = RowParts.of(call, workers=workers, least_rows=least_rows)
        return None if parts is None else cls(call, parts)

    @property
    def call(self) -> Call:
        given, mask, parts = self.given, self.given.mask, self.parts
        begin, end = (jnp.minimum(mask.kv_row_ptr[..., i : i + 1], mask.capacity) for i in (0, 1))
        pointer = begin + (end - begin) * jnp.arange(parts.parts + 1, dtype=jnp.int32)[None, None] // parts.parts
        # Only kernels that skip the element test of full blocks read how many there are.
        full: Any = np.zeros((*pointer.shape[:2], parts.parts), np.int32)
        if given.full_is_exact:
            full = jnp.clip(begin + mask.kv_num_full - pointer[..., :-1], 0, jnp.diff(pointer))
        of_parts = dataclasses.replace(
            mask,
            kv_row_ptr=pointer.astype(jnp.int32),
            kv_num_full=full.astype(jnp.int32),
            row_order=None,
            q_indices=None,
            q_row_ptr=None,
            q_num_full=None,
            col_order=None,
            block_q=parts.rows,
            q_len=parts.rows * parts.parts,
        )
        return in_rows(given, self._rows(given.query), of_parts, self._tokens)

    def _rows(self, x: Float[Array, "B T H D"]) -> Float[Array, "B R h D"]:
        b, t, h, d = x.shape
        heads = h // self.parts.group
        x = jnp.moveaxis(x.reshape(b, t, heads, self.parts.group, d), 3, 1).reshape(b, 1, -1, heads, d)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, self.parts.rows - x.shape[2]), (0, 0), (0, 0)))
        return jnp.broadcast_to(x, (b, self.parts.parts, *x.shape[2:])).reshape(b, -1, heads, d)

    def _tokens(self, x: Int[Array, "B T"]) -> Int[Array, "B R"]:
        b, t = x.shape
        x = jnp.broadcast_to(x[:, None], (b, self.parts.group, t)).reshape(b, 1, -1)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, self.parts.rows - x.shape[2])))
        return jnp.broadcast_to(x, (b, self.parts.parts, self.parts.rows)).reshape(b, -1)

    def results(
        self, out: Float[Array, "B R h Dv"], lse: Float[Array, "B h R"]
    ) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
        """The output keeps the lse's dtype: the parts are rounded already."""
        b, _, heads, d = out.shape
        cut, t = self.parts, self.given.q_len
        out = out.reshape(b, cut.parts, cut.rows, heads, d)[:, :, : cut.group * t].astype(lse.dtype)
        lse = lse.reshape(b, heads, cut.parts, cut.rows)[..., : cut.group * t]
        peak = lse.max(2)
        if (sink := self.given.sink_lse) is not None:
            sink = jnp.repeat(sink.reshape(-1, heads, cut.group), t, axis=2).astype(lse.dtype)
            peak = jnp.maximum(peak, sink)
        safe = jnp.where(peak == -jnp.inf, 0.0, peak)
        weight = jnp.exp(lse - safe[:, :, None])
        total = weight.sum(2)
        if sink is not None:
            total = total + jnp.exp(sink - safe)
        empty = total == 0
        share = weight / jnp.where(empty, 1.0, total)[:, :, None]
        merged = jnp.einsum("bprhd,bhpr->brhd", out, share, precision=jax.lax.Precision.HIGHEST)
        merged = jnp.moveaxis(merged.reshape(b, cut.group, t, heads, d), 1, 3).reshape(b, t, -1, d)
        lse = jnp.where(empty, -jnp.inf, safe + jnp.log(jnp.where(empty, 1.0, total)))
        return merged, lse.reshape(b, heads * cut.group, t)
