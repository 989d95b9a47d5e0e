"""Run a model under a method's masks.

A layer is three programs: what comes before attention, the method's choice of blocks, and attention with what follows.
Only the second differs from method to method; the others are compiled once for all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Num

from xsake.hads.calibration.layerwise import Layers, run_block
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.study.methods.layer import Blocks, TokenMask
from xsake.hads.study.methods.mask import MethodMask, causal_mask


def run(
    layers: Layers,
    tokens: Int[Array, "B T"],
    mask_fn: MethodMask | None = None,
    *,
    attention_dtype: Any = None,
    watch: Callable[[Blocks | TokenMask, Array, Array], None] | None = None,
) -> tuple[Float[Array, "B T width"], Num[Array, "L B H"] | None]:
    """`model.hidden(tokens, mask_fn=mask_fn)`, and the active blocks of each layer, sequence and head of its masks.

    Without `mask_fn` attention is dense, and there are no counts. Queries, keys and values are rounded to
    `attention_dtype` where one is given: a model in float32 can then use kernels for 16 bits. `watch` is given what
    each layer keeps, and its query and key, layer after layer.
    """
    x, shared = layers.start(tokens)
    counts, memory = [], None
    for number, weights in enumerate(layers.weights):
        inputs = project(layers.graph, weights, x, shared, attention_dtype)
        if mask_fn is None:
            x = attend(layers.graph, layers.model.attention_fn, weights, x, shared, inputs)
            continue
        blocks, count, memory = choose_blocks(mask_fn, jnp.int32(number), inputs[0], inputs[1], memory)
        counts.append(count)
        if watch is not None:
            watch(blocks, *inputs[:2])
        grid = mask_fn.profile.grid(tokens.shape[1])
        x = attend(layers.graph, layers.model.attention_fn, weights, x, shared, inputs, blocks, grid)
    return layers.model.norm(x), None if mask_fn is None else jnp.stack(counts)


@partial(jax.jit, static_argnames=("graph", "dtype"))
def project(graph: Any, weights: Any, x: Array, shared: Any, dtype: Any) -> tuple[Array, Array, Array]:
    """A block's query, key and value; nothing after them is computed."""
    seen = []

    def stop(query: Array, key: Array, value: Array) -> Array:
        q, k, v = (x if dtype is None else x.astype(dtype) for x in (query, key, value))
        seen.append((q, k, v))
        return jnp.zeros_like(query)

    run_block(graph, weights, x, shared, stop)
    return seen[0]


@jax.jit
def choose_blocks(
    mask_fn: MethodMask, layer: Array, query: Array, key: Array, memory: Any = None
) -> tuple[Blocks | TokenMask, Num[Array, "B H"], Any]:
    """A layer's choice, its number of blocks per head (for single tokens, their share in blocks), and its memory."""
    kept, memory = mask_fn.choose(layer, query, key, memory)
    return kept, kept.counts() if isinstance(kept, TokenMask) else kept.sum((-2, -1)), memory


@partial(jax.jit, static_argnames=("graph", "attention_fn", "grid"), donate_argnames="x")
def attend(
    graph: Any,
    attention_fn: Any,
    weights: Any,
    x: Array,
    shared: Any,
    inputs: tuple[Array, Array, Array],
    blocks: Array | TokenMask | None = None,
    grid: CausalGrid | None = None,
) -> Array:
    """A block's output from its query, key and value; attention is dense, or restricted to `blocks`."""
    if isinstance(blocks, TokenMask):
        return run_block(graph, weights, x, shared, lambda *_: blocks.attend(*inputs).astype(x.dtype))
    options: dict[str, Any] = {"is_causal": True}
    if blocks is not None and grid is not None:
        options["mask"] = causal_mask(blocks, grid)

    # The block's own query, key and value are not used here, so they are not computed again.
    return run_block(graph, weights, x, shared, lambda *_: attention_fn(*inputs, **options).astype(x.dtype))
