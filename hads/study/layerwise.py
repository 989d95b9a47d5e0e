"""A model under a method's masks."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from xsake.hads.layerwise import Layers, run_block


def run(
    layers: Layers, tokens: Int[Array, "B T"], mask_fn: Any = None
) -> tuple[Float[Array, "B T width"], Int[Array, "L B H"] | None]:
    """`model.hidden(tokens, mask_fn=mask_fn)`, and the active blocks of each layer, sequence and head of its masks.

    `mask_fn` must be a pytree, and take a traced layer number; None is dense, and there are no counts.
    """
    x, rotation = layers.start(tokens)
    counts = []
    for number, weights in enumerate(layers.weights):
        x, count = _block(layers.graph, layers.model.attention_fn, weights, mask_fn, jnp.int32(number), x, rotation)
        counts.append(count)
    return layers.model.norm(x), None if mask_fn is None else jnp.stack(counts)


@partial(jax.jit, static_argnames=("graph", "attention_fn"), donate_argnames="x")
def _block(
    graph: Any, attention_fn: Any, weights: Any, mask_fn: Any, layer: Array, x: Array, rotation: Any
) -> tuple[Array, Array | None]:
    active = None

    def attend(query: Array, key: Array, value: Array) -> Array:
        nonlocal active
        if mask_fn is None:
            return attention_fn(query, key, value, is_causal=True)
        mask = mask_fn(layer, query, key)
        active = jnp.broadcast_to(mask.kv_row_ptr[..., -1], (x.shape[0], mask.heads))
        return attention_fn(query, key, value, mask=mask)

    return run_block(graph, weights, x, rotation, attend), active
