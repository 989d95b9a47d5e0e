"""Whole models with random weights, and profiles that are made from them."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from xsake._plan.models import PUBLISHED
from xsake.hads import HadsProfile, calibrate
from xsake.model import PRESETS, ModelConfig, Transformer

MODELS = {  # tokens of a prompt, and of its chunks
    "qwen2.5-1.5b": (dataclasses.replace(PUBLISHED["qwen2.5-1.5b"], qkv_bias=True), 32768, 4096),
    "smollm2-135m": (PRESETS["smollm2-135m"], 8192, 2048),
    "tiny": (PRESETS["tiny"], 512, 256),
}


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)


def make(config: ModelConfig) -> Transformer:
    """With random weights, drawn array by array: one program for all of them takes a GPU 100 s to compile."""

    def shapes_of() -> Transformer:
        return Transformer(config, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)

    graph, shapes = nnx.split(nnx.eval_shape(shapes_of))
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(shapes))))

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Array:
        if len(leaf.shape) > 1:
            return _normal(next(keys), leaf.shape, leaf.dtype)
        is_bias = "bias" in jax.tree_util.keystr(path)
        return jnp.zeros(leaf.shape, leaf.dtype) if is_bias else jnp.ones(leaf.shape, leaf.dtype)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(draw, shapes))


def profile_of(model: Transformer, length: int) -> HadsProfile:
    """With blocks that suit prompts of this length."""
    block = 64 if length >= 4096 else 16
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 16 * block))
    return calibrate(model, tokens, name="random", block=block, steps=20)
