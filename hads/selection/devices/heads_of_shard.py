"""The part of a layer's inputs that one shard of the heads chooses blocks from."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec as P

from xsake.hads.selection.given import Given


def divides(q_heads: int, kv_heads: int, masks: int, shards: int) -> bool:
    """Whether each shard has the KV heads of its query heads, whole, and whole masks."""
    if q_heads % shards or masks % shards:
        return False
    mine, group = q_heads // shards, q_heads // kv_heads
    return mine % group == 0 or group % mine == 0


def specs_of_shards(batch: Any, heads: tuple[str, ...], kv_heads: int, shards: int) -> tuple[P, P]:
    """The specs of query and key for shards of batch and heads; all KV heads are everywhere if shards cut them."""
    of_keys = heads if kv_heads % shards == 0 else ()
    return P(batch, None, heads or None, None), P(batch, None, of_keys or None, None)


def heads_of_shard(given: Given, kv_heads: int, axes: tuple[str, ...]) -> Given:
    """The inputs of a shard of query heads: its heads' weights, and the KV heads that its query heads share.

    `given.query` is the shard's part, `given.key` its part or all `kv_heads` KV heads; the weights are of all heads.
    """
    if not axes:
        return given
    q_heads, mine = given.sensitivity.shape[0], given.query.shape[2]
    index, group = jax.lax.axis_index(axes), q_heads // kv_heads
    keys = max(mine // group, 1)
    key = given.key
    if key.shape[2] != keys:
        key = jax.lax.dynamic_slice_in_dim(key, index * mine // group, keys, 2)

    def part(x: Array) -> Any:
        return jax.lax.dynamic_slice_in_dim(x, index * mine, mine, 0)

    kept = given.kept
    if given.segments is None:  # the counts of packed documents are of all heads
        kept = {name: part(x) if x.ndim else x for name, x in kept.items()}
    estimator, sensitivity, burstiness = jax.tree.map(part, (given.estimator, given.sensitivity, given.burstiness))
    return Given(given.query, key, estimator, sensitivity, burstiness, kept, given.segments)
