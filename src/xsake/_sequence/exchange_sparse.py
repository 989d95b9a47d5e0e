"""The sparse exchange: only those blocks of keys and values travel that some row of the receiving shard lists.

Every shard asks every other for blocks, by their numbers, up to a fixed capacity per K/V head. One K/V head after
another, the blocks arrive, in slots behind the shard's own keys, and a mask over own blocks and slots is made from the
shard's lists. Gradients of what arrived go back the same way and are added up where the blocks live.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake._ground.trace import vary, varying_axes
from xsake._op.run import Runner
from xsake._rewrites.dims import call_dims
from xsake._rewrites.head_pieces import by_heads, wide
from xsake.backend.contract import Call
from xsake.hads.mask.row_shards import RowShards
from xsake.hads.mask.shard_masks import mask_of_columns


@dataclasses.dataclass(frozen=True)
class Sparse:
    """The exchange over `shards` devices along mesh `axes`; `capacity` blocks per K/V head from each device to each."""

    runner: Runner
    axes: str | tuple[str, ...]
    shards: int
    capacity: int

    def forward(self, shard: Any) -> tuple[Array, Array]:
        def run(call: Call, blocks: Array, wanted: Array, asked: Array) -> tuple:
            return self.runner.run_forward(self._call(shard, call, blocks, wanted, asked, transpose=False))

        given, dims, overflowed = self._given(shard)
        batch, tokens, heads, _ = dims[0].query
        results = ((batch, tokens, heads, dims[0].value[3]), (batch, heads, tokens))
        out, lse = by_heads(run, given, dims, results, shard.call.kv_heads)
        lost = jnp.repeat(overflowed, shard.call.q_heads // shard.call.kv_heads)
        lse = jnp.where(lost[None, :, None], jnp.nan, self.runner.contract_lse(lse))
        return jnp.where(lost[None, None, :, None], jnp.nan, out), lse

    def backward(self, shard: Any, with_bias: bool, lse: Array, delta: Array, d_out: Array) -> tuple:
        own = jax.lax.axis_index(self.axes)

        def run(call: Call, blocks: Array, wanted: Array, asked: Array, *given: Array) -> tuple:
            whole = self._call(shard, call, blocks, wanted, asked, transpose=True)
            query, key, value, *bias = self.runner.run_backward(with_bias, whole, *given)
            columns, _ = self._columns(shard.rows, wanted, own)
            key, value = (self._home(shard.rows, x, wanted, asked) for x in (key, value))
            return query, key, value, *(_scatter_columns(shard.rows, x, call.bias, columns) for x in bias)

        given, dims, _ = self._given(shard)
        of_call = dims[0]
        batch, tokens, heads, _ = of_call.query
        rows = (batch, heads, tokens)
        results = (of_call.query, of_call.key, of_call.value) + ((of_call.bias,) if with_bias else ())
        dims = (*dims, rows, rows, (batch, tokens, heads, of_call.value[3]))
        return by_heads(run, (*given, lse, delta, d_out), dims, results, shard.call.kv_heads)

    def _given(self, shard: Any) -> tuple[tuple, tuple, Array]:
        """((call, blocks, wanted, asked), what their dimensions stand for, bool[K]: asked for more than fits)."""
        rows: RowShards = shard.rows
        blocks = rows.to_blocks()
        own = jax.lax.axis_index(self.axes)
        need = _of_kv_heads(blocks.any((0, 2)), shard.call.kv_heads).reshape(-1, self.shards, rows.columns)
        need &= (jnp.arange(self.shards) != own)[None, :, None]
        count = need.sum(-1, dtype=jnp.int32)
        first = jnp.argsort(~need, axis=-1, stable=True)[..., : self.capacity].astype(jnp.int32)
        wanted = jnp.where(np.arange(self.capacity)[None, None] < count[..., None], first, -1)  # [K, holder, capacity]
        asked = jax.lax.all_to_all(wanted, self.axes, 1, 1, tiled=True)  # [K, asking shard, capacity]
        call = dataclasses.replace(shard.call, bias=shard.bias, kv_segments=None, kv_positions=None, sink_lse=None)
        dims = call_dims(call)
        heads = {1: None, call.q_heads: "h"}.get(rows.heads, "k")
        k = "k" if call.kv_heads > 1 else None
        overflowed = (count > self.capacity).any(-1)
        return (
            (call, blocks, wanted, asked),
            (dims, (None, heads, None, None), (k, None, None), (k, None, None)),
            overflowed,
        )

    def _call(self, shard: Any, call: Call, blocks: Array, wanted: Array, asked: Array, *, transpose: bool) -> Call:
        """The call of one K/V head: to this shard's own keys and to those that arrive."""
        rows, own = shard.rows, jax.lax.axis_index(self.axes)
        columns, used = self._columns(rows, wanted, own)
        active = jnp.take(blocks, columns, axis=3) & used[None, None, None]
        return dataclasses.replace(
            call,
            key=jnp.concatenate([call.key, self._arriving(rows, call.key, wanted, asked)], 1),
            value=jnp.concatenate([call.value, self._arriving(rows, call.value, wanted, asked)], 1),
            mask=mask_of_columns(rows, active, own, columns, transpose=transpose),
            bias=_gather_columns(rows, call.bias, columns, 3),
            kv_segments=_gather_columns(rows, shard.kv_segments, columns, 1),
            kv_positions=_gather_columns(rows, shard.kv_positions, columns, 1),
        )

    def _columns(self, rows: RowShards, wanted: Array, own: Array) -> tuple[Array, Array]:
        """(where each key block of a call lies among all shards' blocks, whether it is there), own blocks first."""
        mine = own * rows.columns + jnp.arange(rows.columns, dtype=jnp.int32)
        wanted = wanted.reshape(self.shards, self.capacity)
        theirs = jnp.arange(self.shards, dtype=jnp.int32)[:, None] * rows.columns + jnp.maximum(wanted, 0)
        used = jnp.concatenate([jnp.ones(rows.columns, bool), (wanted >= 0).reshape(-1)])
        return jnp.concatenate([mine, theirs.reshape(-1)]), used

    def _arriving(self, rows: RowShards, x: Array, wanted: Array, asked: Array) -> Array:
        """[B, tokens, 1, D]: the blocks of one head that this shard asked for, in its slots."""
        batch, _, _, channels = x.shape
        own = x.reshape(batch, rows.columns, rows.grid.block_kv, channels)
        sent = jnp.take(own, jnp.maximum(asked.reshape(self.shards, self.capacity), 0), axis=1)
        return self._swap(sent, asked, wanted).reshape(batch, -1, 1, channels)

    def _swap(self, slots: Array, sent: Array, received: Array) -> Array:
        """slots[:, i] for shard i, and back what shard i has for this one. Blocks that are not there are -1 in `sent`
        and `received`: only CPUs, which know no other exchange, send them too.
        """

        def padded(slots: Array, *_: Array) -> Array:
            return jax.lax.all_to_all(slots, self.axes, 1, 1, tiled=True)

        def ragged(slots: Array, sent: Array, received: Array) -> Array:
            flat = jnp.moveaxis(slots.reshape(slots.shape[0], -1, *slots.shape[3:]), 1, 0)
            slot = jnp.arange(self.shards, dtype=jnp.int32) * self.capacity
            here = jnp.full(self.shards, jax.lax.axis_index(self.axes) * self.capacity, jnp.int32)
            given = vary((flat, jnp.zeros_like(flat), slot, sent, here, received), varying_axes(flat))
            arrived = jax.lax.ragged_all_to_all(*given, axis_name=self.axes)
            return jnp.moveaxis(arrived, 0, 1).reshape(slots.shape)

        sizes = [(x.reshape(self.shards, -1) >= 0).sum(-1, dtype=jnp.int32) for x in (sent, received)]
        return jax.lax.platform_dependent(slots, *sizes, cpu=padded, default=ragged)

    def _home(self, rows: RowShards, grad: Array, wanted: Array, asked: Array) -> Array:
        """The gradient of this shard's keys, from its own call and from the calls of those who asked."""
        batch, _, _, channels = grad.shape
        tokens = rows.columns * rows.grid.block_kv
        own, theirs = wide(grad[:, :tokens]), wide(grad[:, tokens:])
        theirs = theirs.reshape(batch, self.shards, self.capacity, rows.grid.block_kv, channels)
        back = self._swap(theirs, wanted, asked)
        total = own.reshape(batch, rows.columns, rows.grid.block_kv, channels)
        # Slots that nobody asked for bring zeros.
        places = jnp.maximum(asked.reshape(-1), 0)
        total = total.at[:, places].add(back.reshape(batch, -1, *back.shape[3:]))
        return total.reshape(batch, tokens, 1, channels).astype(grad.dtype)


def _of_kv_heads(need: Array, kv_heads: int) -> Array:
    """bool[K, columns] from what heads of the mask need, [1 | K | H, columns]."""
    if need.shape[0] > kv_heads:
        return need.reshape(kv_heads, -1, need.shape[1]).any(1)
    return jnp.broadcast_to(need, (kv_heads, need.shape[1]))


def _gather_columns(rows: RowShards, x: Array | None, columns: Array, axis: int) -> Array | None:
    if x is None or x.shape[axis] == 1:
        return x
    split = x.reshape(*x.shape[:axis], -1, rows.grid.block_kv)
    return jnp.take(split, columns, axis=axis).reshape(*x.shape[:axis], -1)


def _scatter_columns(rows: RowShards, part: Array, like: Any, columns: Array) -> Array:
    """The gradient of a bias from that of its gathered columns. Columns that are not there have zeros."""
    if like.shape[3] == 1:
        return part
    split = wide(part).reshape(*part.shape[:3], -1, rows.grid.block_kv)
    total = jnp.zeros((*like.shape[:3], like.shape[3] // rows.grid.block_kv, rows.grid.block_kv), split.dtype)
    return total.at[:, :, :, columns].add(split).reshape(like.shape).astype(part.dtype)
