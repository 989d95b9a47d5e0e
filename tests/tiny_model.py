"""A small model for the tests, with weights far from their initial values: attention and norms are not uniform."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from xsake.model import PRESETS, Transformer

TINY = PRESETS["tiny"]
LENGTH = 40
TOKENS = np.random.default_rng(0).integers(TINY.vocab_size, size=(2, LENGTH)).astype(np.int32)

# Tests that generate from these with one layer and a budget of 0.8 share programs.
FOUR_PROMPTS = [np.random.default_rng(n).integers(TINY.vocab_size, size=100 + 10 * n).tolist() for n in range(4)]


def build(**options: Any) -> Transformer:
    options = dict(config=TINY, rngs=nnx.Rngs(0), dtype=jnp.float32) | options
    model = Transformer(options.pop("config"), **options)
    state, rng = nnx.state(model), np.random.default_rng(1)
    nnx.update(model, jax.tree.map(lambda x: x + jnp.asarray(0.2 * rng.standard_normal(x.shape), x.dtype), state))
    return model


def assert_same_weights(found: Transformer, expected: Transformer) -> None:
    assert found.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(found), nnx.state(expected))


def run(model: Transformer, tokens: Any, cache: Any = None, **options: Any) -> Any:
    """The model's compiled forward; without options, all calls share one compiled function."""
    graph, state = nnx.split(model)
    if not options:
        return _run(graph, state, jnp.asarray(tokens), cache)
    return jax.jit(lambda state, tokens, cache: nnx.merge(graph, state)(tokens, cache=cache, **options))(
        state, jnp.asarray(tokens), cache
    )


@partial(jax.jit, static_argnums=0)
def _run(graph: nnx.GraphDef, state: Any, tokens: jax.Array, cache: Any) -> Any:
    return nnx.merge(graph, state)(tokens, cache=cache)
