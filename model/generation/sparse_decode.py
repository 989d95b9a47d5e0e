"""A forward for one or a few new tokens, in which every layer attends to the blocks of its cache that HADS chooses."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

import xsake
from xsake._ground.device import platform_of
from xsake.hads.profile.causal_grid import blocks_back
from xsake.hads.selection.chunk import LayerWeights
from xsake.hads.selection.pooled_keys import PooledKeys
from xsake.hads.selection.step import blocks
from xsake.hads.selection.step.blocks import select_step, step_count
from xsake.hads.selection.step.mask import step_mask
from xsake.kernels_xla_ref.gathered import attend_blocks
from xsake.model.generation.hads_budget import HadsBudget
from xsake.model.generation.sampling import Sampler
from xsake.model.network.cache import KVCache
from xsake.model.network.transformer import Transformer


class StepRule(blocks.StepRule):
    """The static arguments of a step, from a budget."""

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
    pooled: tuple[PooledKeys | None, ...],
    learned: tuple[LayerWeights | None, ...],
    key: Array,
) -> tuple[Array, KVCache, tuple[PooledKeys | None, ...]]:
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
    pooled: tuple[PooledKeys | None, ...],
    learned: tuple[LayerWeights | None, ...],
) -> tuple[Float[Array, "B T vocab"], KVCache, tuple[PooledKeys | None, ...]]:
    """(logits after each of a few new tokens, the cache and its pooled keys with these tokens).

    The tokens share the blocks that a layer chooses, and each attends to those of their keys that are not after it.
    Logits of tokens past the cache's capacity are NaN.
    """
    count = tokens.shape[1]
    if count > 1 and count > step.tokens:
        raise ValueError(f"{count} new tokens at once, but the step's rule is for {step.tokens}: make it for {count}")
    places = cache.slots(count)
    x, turned = model.start(tokens, places)
    lengths, slot_positions = cache.length + count, cache.positions()
    now = []
    for layer, block in enumerate(model.blocks):

        def attend(
            query: Array, key: Array, value: Array, layer: int = layer, cache: KVCache = cache
        ) -> tuple[Array, Any]:
            cache = cache.write(layer, key, value)
            keys, before, weights = cache.keys[layer], pooled[layer], learned[layer]
            given = query, keys, cache.values[layer]
            if before is None or weights is None:
                window = model.config.window_of(layer)
                assert window is not None  # HADS leaves no other layer alone
                *seen, there = cache.window(layer, count, window)
                rules: dict[str, Any] = dict(is_causal=True, local_window_size=(window - 1, 0))
                return model.attention_fn(query, *seen, positions=(places, there), **rules), (cache, None)
            own = before.write_last(keys, lengths, block=step.block, tokens=count)
            # XLA alone would cut the whole cache into tiles before it takes the blocks that a mask lists.
            if platform_of(query) == "gpu":
                mask = step_mask(query, own, weights, lengths, step, slots=cache.capacity)
                positions = places, slot_positions
                out = attend_listed(*given, mask, positions, window=step.window)
            else:
                chosen = select_step(query, own, weights, lengths, step)
                out = attend_blocks(*given, *chosen, lengths, block_size=step.block, window=step.window)
            return out, (cache, own)

        x, (cache, own) = block(x, turned, attend)
        now.append(own)
    logits = model.logits(model.norm(x))
    fits = (places < cache.capacity)[..., None]
    return jnp.where(fits, logits, np.nan), cache.advance(count), tuple(now)


def attend_listed(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K D"],
    mask: xsake.BlockMask,
    positions: tuple[Int[Array, "B T"], Int[Array, "B S"]],
    *,
    window: int | None = None,
) -> Float[Array, "B T H D"]:
    """As `attend_blocks`, but nothing is gathered: kernels read the blocks that a mask lists where they are.

    Keys past a sequence's length must be finite.
    """
    reach = None if window is None else (window - 1, 0)
    return xsake.attention(query, key, value, mask, is_causal=True, positions=positions, local_window_size=reach)
