"""Writer: tokens that follow others, one program over all layers per token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from xsake.hads import LayerWeights, PooledKeys
from xsake.model.generation import sparse_decode
from xsake.model.generation.sampling import Sampler
from xsake.model.network.cache import KVCache
from xsake.model.network.transformer import Transformer


class Writer:
    """Writes after the tokens of a cache: with a `step`, every token attends to the blocks that HADS chooses.

    `cache` and `pooled` are used up, and replaced by those with the new tokens. Weights are a list of arrays, as in
    `read_prompts`: jit would take modules apart, or hash their graph, anew for every token.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        sampler: Sampler,
        *,
        step: sparse_decode.StepRule | None = None,
        pooled: tuple[PooledKeys | None, ...] = (),
        learned: tuple[LayerWeights | None, ...] = (),
    ):
        self.weights, self.tree = jax.tree.flatten(model)
        self.cache, self.sampler = cache, sampler
        self.step, self.pooled, self.learned = step, pooled, learned

    def first(self, last: Array, key: Array) -> Array:
        """The token after each prompt, i32[B], from the last states of `read_prompts`."""
        return _first(self.tree, self.sampler, self.weights, last, key)

    def next(self, tokens: Array, key: Array) -> Array:
        """The tokens after these, which join the cache."""
        if self.step is None:
            tokens, self.cache = _decode(self.tree, self.sampler, self.weights, tokens, self.cache, key)
        else:
            tokens, self.cache, self.pooled = sparse_decode.decode(
                self.tree, self.sampler, self.step, self.weights, tokens, self.cache, self.pooled, self.learned, key
            )
        return tokens

    def follow(self, tokens: Array, keys: Array | Sequence[Array]) -> Iterator[np.ndarray]:
        """The tokens after these, i32[B] per key.

        A token is handed out when the next one is on its way: the device does not wait for the host.
        """
        before = None
        for key in keys:
            tokens = self.next(tokens, key)
            if before is not None:
                yield np.asarray(before)
            before = tokens
        if before is not None:
            yield np.asarray(before)


@partial(jax.jit, static_argnums=(0, 1))
def _first(tree: Any, sampler: Sampler, weights: list[Array], last: Array, key: Array) -> Array:
    model: Transformer = jax.tree.unflatten(tree, weights)
    return sampler(model.logits(model.norm(last))[:, 0], key)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _decode(
    tree: Any, sampler: Sampler, weights: list[Array], tokens: Array, cache: KVCache, key: Array
) -> tuple[Array, KVCache]:
    model: Transformer = jax.tree.unflatten(tree, weights)
    logits, cache = model(tokens[:, None], cache=cache)
    return sampler(logits[:, 0], key), cache
