"""How far predictions move while tokens are written with some of the cache's blocks: KL(dense || sparse), step by step.

Dense attention chooses the tokens greedily. Every budget is fed the same tokens, and keeps a cache of its own after the
prompt, which dense attention has read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.hads import HadsProfile, LayerWeights, PooledKeys
from xsake.model import HadsBudget, KVCache
from xsake.model.generation.prefill import Prompt
from xsake.model.generation.sampling import Sampler
from xsake.model.generation.sparse_decode import StepRule, forward
from xsake.model.generation.writer import Writer
from xsake.model.network.transformer import Transformer


class Divergence(NamedTuple):
    """After each token: KL in nats, and whether the likeliest next token is that of dense attention."""

    kl: np.ndarray  # float32[tokens]
    same: np.ndarray  # bool[tokens]


def divergences(
    model: Transformer, profile: HadsProfile, read: Prompt, budgets: Sequence[float], tokens: int
) -> dict[float, Divergence]:
    """Of each budget, over `tokens` tokens after one prompt, whose cache is used up.

    All go on together, a token at a time: logits of one step are kept, and a cache for each budget.
    """
    if len(read.cache.length) != 1:
        raise ValueError(f"{len(read.cache.length)} prompts were read: give one at a time")
    read.cache.check_room(tokens)
    length, capacity = int(read.cache.length[0]), read.cache.capacity
    weights, tree = jax.tree.flatten(model)
    pooled = pool(read.cache, profile.block)
    ways = []
    for budget in budgets:
        hads = HadsBudget(profile, 1.0, budget)
        step = StepRule.of(hads, shortest=length, capacity=capacity)
        ways.append(_Way(step, hads.learned, *jax.tree.map(jnp.copy, (read.cache, pooled))))
    token, cache = Writer(model, read.cache, Sampler()).first(read.last, jax.random.key(0)), read.cache
    found: list[list[tuple[Array, Array]]] = [[] for _ in ways]
    for _ in range(tokens):
        following, dense, cache = _dense_step(tree, weights, token, cache)
        for n, way in enumerate(ways):
            seen, *grown = _sparse_step(tree, way.step, weights, token, way.cache, way.pooled, way.learned, dense)
            ways[n] = way._replace(cache=grown[0], pooled=grown[1])
            found[n].append(seen)
        token = following
    result = {}
    for budget, steps in zip(budgets, found, strict=True):
        kl, same = (np.concatenate(x) for x in zip(*jax.device_get(steps), strict=True))
        if not np.isfinite(kl).all():
            raise FloatingPointError(
                f"{(~np.isfinite(kl)).sum()} of {tokens} divergences at {budget:.0%} are not finite"
            )
        result[budget] = Divergence(kl, same)
    return result


class _Way(NamedTuple):
    step: StepRule
    learned: tuple[LayerWeights, ...]
    cache: KVCache
    pooled: tuple[PooledKeys, ...]


def pool(cache: KVCache, block: int) -> tuple[PooledKeys, ...]:
    """The pooled keys of a cache that was filled without them."""
    return tuple(_pool_layer(keys, cache.length, block) for keys in cache.keys)


@partial(jax.jit, static_argnums=2)
def _pool_layer(keys: Array, lengths: Array, block: int) -> PooledKeys:
    batch, capacity, kv_heads, head_dim = keys.shape
    empty = PooledKeys.empty(batch=batch, kv_heads=kv_heads, blocks=-(-capacity // block), head_dim=head_dim)
    return empty.write(keys, lengths, start=0, block=block)


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def _dense_step(tree: Any, weights: list[Array], token: Array, cache: KVCache) -> tuple[Array, Array, KVCache]:
    model: Transformer = jax.tree.unflatten(tree, weights)
    logits, cache = model(token[:, None], cache=cache)
    return Sampler()(logits[:, 0], jax.random.key(0)), logits[:, 0], cache


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4, 5))
def _sparse_step(
    tree: Any,
    step: StepRule,
    weights: list[Array],
    token: Array,
    cache: KVCache,
    pooled: tuple[PooledKeys, ...],
    learned: tuple[LayerWeights, ...],
    dense: Array,
) -> tuple[tuple[Array, Array], KVCache, tuple[PooledKeys, ...]]:
    model: Transformer = jax.tree.unflatten(tree, weights)
    logits, cache, pooled = forward(model, step, token[:, None], cache, pooled, learned)
    one, other = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (dense, logits[:, 0]))
    kl = (jnp.exp(one) * (one - other)).sum(-1)
    return (kl, one.argmax(-1) == other.argmax(-1)), cache, pooled
