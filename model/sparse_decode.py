"""A forward for one or a few new tokens, in which every layer attends to the blocks of its cache that HADS chooses."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

import xsake
from xsake._device import platform_of
from xsake.hads.profile.causal_grid import blocks_back
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
    tokens: int = 1
    window: int | None = None

    @classmethod
    def of(cls, hads: HadsBudget, *, shortest: int, capacity: int, tokens: int = 1) -> StepRule:
        """For at most `tokens` new tokens at once, up to 8.

        ValueError if the budget does not cover the blocks that are always on, with the shortest prompt.
        """
        if not 1 <= tokens <= 8:
            raise ValueError(f"{tokens=} at once must be from 1 to 8: read more as a prompt, chunk by chunk")
        assert hads.decode is not None
        profile = hads.profile
        window = profile.window
        options: dict[str, Any] = dict(tokens=tokens, reach=window and blocks_back(window, profile.block))
        counts = [
            step_count(-(-length // profile.block), profile.kv_heads, hads.decode, profile.rule, **options)
            for length in (shortest + 1, capacity)
        ]
        return cls(hads.decode, counts[1], profile.block, profile.rule, tokens, window)


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(5, 6))
def decode(
    tree: Any,
    sampler: Sampler,
    step: StepRule,
    weights: list[Array],
    tokens: Int[Array, "B"],
    cache: KVCache,
    pooled: tuple[PooledKeys, ...],
    learned: tuple[LayerWeights, ...],
    key: Array,
) -> tuple[Array, KVCache, tuple[PooledKeys, ...]]:
    """(the next token of every sequence, the cache and its pooled keys with the given tokens).

    Tree and weights are of `jax.tree.flatten(model)`.
    """
    model: Transformer = jax.tree.unflatten(tree, weights)
    logits, cache, pooled = forward(model, step, tokens[:, None], cache, pooled, learned)
    return sampler(logits[:, 0], key), cache, pooled


def forward(
    model: Transformer,
    step: StepRule,
    tokens: Int[Array, "B T"],
    cache: KVCache,
    pooled: tuple[PooledKeys, ...],
    learned: tuple[LayerWeights, ...],
) -> tuple[Float[Array, "B T vocab"], KVCache, tuple[PooledKeys, ...]]:
    """(logits after each of a few new tokens, the cache and its pooled keys with these tokens).

    The tokens share the blocks that a layer chooses, and each attends to those of their keys that are not after it.
    Logits of tokens past the cache's capacity are NaN.
    """
    count = tokens.shape[1]
    if count > 1 and count > step.tokens:
        raise ValueError(f"{count} new tokens at once, but the step's rule is for {step.tokens}: make it for {count}")
    places = cache.slots(count)
    x, rotation = model.start(tokens, places)
    lengths = cache.length + count
    now = []
    for layer, block in enumerate(model.blocks):

        def attend(
            query: Array, key: Array, value: Array, layer: int = layer, cache: KVCache = cache
        ) -> tuple[Array, Any]:
            cache = cache.write(layer, key, value)
            keys = cache.keys[layer]
            own = pooled[layer].write_last(keys, lengths, block=step.block, tokens=count)
            options = {name: value for name, value in step._asdict().items() if name != "tokens"}
            chosen = select_step(query, own, learned[layer], lengths, **options)
            # XLA alone would cut the whole cache into tiles before it takes those that a mask lists.
            attend_to = attend_listed if platform_of(query) == "gpu" else attend_blocks
            limits: dict[str, Any] = dict(block_size=step.block, window=step.window)
            return attend_to(query, keys, cache.values[layer], *chosen, lengths, **limits), (cache, own)

        x, (cache, own) = block(x, rotation, attend)
        now.append(own)
    logits = model.logits(model.norm(x))
    fits = (places < cache.capacity)[..., None]
    return jnp.where(fits, logits, np.nan), cache.advance(count), tuple(now)


def attend_listed(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K D"],
    kv_head: Int[Array, "B W"],
    block: Int[Array, "B W"],
    live: Bool[Array, "B W"],
    lengths: Int[Array, "B"],
    *,
    block_size: int,
    window: int | None = None,
) -> Float[Array, "B T H D"]:
    """As `attend_blocks`, but nothing is gathered: the list becomes a mask, and kernels read the blocks where they are.

    Keys past a sequence's length must be finite.
    """
    b, tokens = query.shape[:2]
    slots, groups = key.shape[1:3]
    blocks = -(-slots // block_size)
    listed = jnp.zeros((b, groups, 1, blocks), bool)
    listed = listed.at[jnp.arange(b)[:, None], kv_head, 0, block].max(live)
    sizes: dict[str, Any] = dict(block_q=64, block_kv=block_size, q_len=tokens, kv_len=slots)
    mask = xsake.BlockMask.from_blocks(listed, **sizes, capacity=min(block.shape[1], blocks), transpose=False)
    last = lengths[:, None] - tokens + jnp.arange(tokens, dtype=jnp.int32)[None]
    positions = last, jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (b, slots))
    reach = None if window is None else (window - 1, 0)
    return xsake.attention(query, key, value, mask, is_causal=True, positions=positions, local_window_size=reach)
