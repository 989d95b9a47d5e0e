"""A transformer run block by block: one small compiled program for each method, not one as large as the model.

The blocks of an `xsake.model.Transformer` are alike, so the program of one serves all; its weights, its number, the
profile and the budget are arguments.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


class Layerwise:
    """`Layerwise(model)(tokens, mask_fn)` is `model.hidden(tokens, mask_fn=mask_fn)`, and the number of active blocks.

    `mask_fn` must be a pytree, and take a traced layer number.
    """

    def __init__(self, model: Any):
        from flax import nnx

        self.model = model
        split = [nnx.split(block) for block in model.blocks]
        self._graph = split[0][0]
        if any(graph != self._graph for graph, _ in split):
            raise ValueError("the model's blocks are not alike: they cannot share a program")
        self._weights = [weights for _, weights in split]

    def __call__(
        self, tokens: Int[Array, "B T"], mask_fn: Any = None
    ) -> tuple[Float[Array, "B T width"], Int[Array, "L B H"] | None]:
        """Final normed states, and active blocks of each layer, sequence and mask head (None without masks: dense)."""
        from xsake.model.rope import Rotation

        config = self.model.config
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        rotation = Rotation.of(positions, config.head_dim, config.rope_base)
        x, counts = self.model.embed(tokens), []
        for number, weights in enumerate(self._weights):
            layer = jnp.int32(number)
            x, count = _block(self._graph, self.model.attention_fn, weights, mask_fn, layer, x, rotation)
            counts.append(count)
        return self.model.norm(x), None if mask_fn is None else jnp.stack(counts)


@partial(jax.jit, static_argnames=("graph", "attention_fn"), donate_argnames="x")
def _block(
    graph: Any, attention_fn: Any, weights: Any, mask_fn: Any, layer: Array, x: Array, rotation: Any
) -> tuple[Array, Array]:
    from flax import nnx

    active = jnp.zeros((x.shape[0], 0), jnp.int32)

    def attend(query: Array, key: Array, value: Array) -> tuple[Array, None]:
        nonlocal active
        if mask_fn is None:
            return attention_fn(query, key, value, is_causal=True), None
        mask = mask_fn(layer, query, key)
        active = jnp.broadcast_to(mask.kv_row_ptr[..., -1], (x.shape[0], mask.heads))
        return attention_fn(query, key, value, mask=mask), None

    x, _ = nnx.merge(graph, weights)(x, rotation, attend)
    return x, active
