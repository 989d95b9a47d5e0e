"""A function of query and key over explicit mesh axes: each device chooses for its sequences and heads.

With explicit axes every operation must say how its result is sharded, so the function runs inside `jax.shard_map`, with
the specs that the arrays' types carry. With automatic axes there is nothing to do: XLA partitions the program itself.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from xsake._ground.explicit import all_or, axes_of, explicit_mesh, placed
from xsake.hads.selection.cut import Cut
from xsake.hads.selection.devices.heads_of_shard import divides, specs_of_shards
from xsake.hads.selection.given import Given


def over_explicit_axes(make: Callable[[Cut, Given], Any], cut: Cut, masks: int, given: Given) -> Any:
    """`make(cut, given)`, whose results are [batch, masks, ...]; over explicit axes by each shard of batch and heads.

    `masks` is how many there are over all shards. Batch and heads stay sharded as they are in the query. Other axes are
    gathered, with a warning. Without explicit axes this is `make` itself.
    """
    mesh = explicit_mesh((given.query, given.key))
    if mesh is None:
        return make(cut, given)
    batch, tokens, heads, features = axes_of(given.query)
    if heads and cut.heads_axes:
        raise ValueError(
            f"heads are sharded over {cut.heads_axes} of the shard_map around this and over the explicit axes {heads}: "
            "let the shard_map have all of them, or none"
        )
    shards = math.prod(mesh.shape[name] for name in heads)
    q_heads, kv_heads = given.query.shape[2], given.key.shape[2]
    if not divides(q_heads, kv_heads, masks, shards):
        features, heads, shards = (*features, *heads), (), 1
    if gathered := (*tokens, *features):
        warnings.warn(
            f"hads.select gathers query and key over the mesh axes {', '.join(gathered)}: it keeps shardings of batch, "
            "and of heads if each shard has whole KV heads and masks; query is sharded as "
            f"{jax.typeof(given.query).sharding.spec}, with {q_heads} query heads, {kv_heads} KV heads and {masks} "
            "masks",
            stacklevel=3,
        )
    query, key = specs_of_shards(batch or None, heads, kv_heads, shards)
    specs = jax.tree.map(lambda x: P(*(None,) * x.ndim), given)._replace(query=query, key=key)
    if given.segments is not None:
        specs = specs._replace(segments=P(batch or None))
    return jax.shard_map(
        partial(make, dataclasses.replace(cut, heads_axes=cut.heads_axes or heads)),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=P(batch or None, heads or None),
        axis_names=all_or(mesh, mesh.explicit_axes),
    )(jax.tree.map(partial(placed, mesh), given, specs))
