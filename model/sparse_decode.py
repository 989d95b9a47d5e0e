"""One forward per token, in which every layer attends to the blocks of its cache that HADS chooses."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from xsake.hads.profile.rule import Rule
from xsake.hads.selection.chunk import LayerWeights
from xsake.hads.selection.pooled_keys import PooledKeys
from xsake.hads.selection.step import select_step, step_count
from xsake.kernels_xla_ref.gathered import attend_blocks
from xsake.model.cache import KVCache
from xsake.model.hads_budget import HadsBudget
from xsake.model.sampling import Sampler
from xsake.model.transformer import Transformer


class StepRule(NamedTuple):
    """What the program of a step is compiled for."""

    budget: float
    room: int
    block: int
    rule: Rule

    @classmethod
    def of(cls, hads: HadsBudget, *, shortest: int, capacity: int) -> StepRule:
        """ValueError if the budget does not cover the blocks that are always on, with the shortest prompt."""
        assert hads.decode is not None
        profile = hads.profile
        counts = [
            step_count(-(-tokens // profile.block), profile.kv_heads, hads.decode, profile.rule)
            for tokens in (shortest + 1, capacity)
        ]
        return cls(hads.decode, counts[1], profile.block, profile.rule)


def learned_layers(hads: HadsBudget) -> tuple[LayerWeights, ...]:
    return tuple(LayerWeights.of(hads.profile, layer) for layer in range(hads.profile.layers))


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(5, 6))
def decode(
    graph: nnx.GraphDef,
    sampler: Sampler,
    step: StepRule,
    weights: Any,
    tokens: Array,
    cache: KVCache,
    pooled: tuple[PooledKeys, ...],
    learned: tuple[LayerWeights, ...],
    key: Array,
) -> tuple[Array, KVCache, tuple[PooledKeys, ...]]:
    """(the next token of every sequence, the cache and its pooled keys with the given tokens)."""
    model: Transformer = nnx.merge(graph, weights)
    x, rotation = model.start(tokens[:, None], cache.slots(1))
    lengths = cache.length + 1
    now = []
    for layer, block in enumerate(model.blocks):

        def attend(
            query: Array, key: Array, value: Array, layer: int = layer, cache: KVCache = cache
        ) -> tuple[Array, Any]:
            cache = cache.write(layer, key, value)
            keys = cache.keys[layer]
            own = pooled[layer].write_last(keys, lengths, block=step.block)
            chosen = select_step(query, own, learned[layer], lengths, **step._asdict())
            out = attend_blocks(query, keys, cache.values[layer], *chosen, lengths, block_size=step.block)
            return out, (cache, own)

        x, (cache, own) = block(x, rotation, attend)
        now.append(own)
    logits = model.logits(model.norm(x))
    fits = (lengths <= cache.capacity)[:, None]
    return sampler(jnp.where(fits, logits[:, 0], np.nan), key), cache.advance(1), tuple(now)
