"""Whole models and their profiles: published, from files, or with random weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from xsake._plan.models import PUBLISHED
from xsake.hads import HadsProfile, calibrate
from xsake.hads.profile.fingerprint import shared
from xsake.hads.study.evaluation import MOST_SHARED
from xsake.hads.study.texts import Text
from xsake.model import PRESETS, ModelConfig, Transformer, load_pretrained

MODELS = {  # tokens of a prompt, and of its chunks
    "qwen2.5-1.5b": (dataclasses.replace(PUBLISHED["qwen2.5-1.5b"], qkv_bias=True), 32768, 4096),
    "llama-8b": (PUBLISHED["llama-8b"], 32768, 4096),
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
    """Calibrate a profile, with blocks that suit prompts of `length` tokens."""
    block = 64 if length >= 4096 else 16
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 16 * block))
    return calibrate(model, tokens, name="random", block=block, steps=20)


def lent_profile(config: ModelConfig) -> HadsProfile:
    """The shipped profile of Qwen2.5-Coder-1.5B for a model of heads as large: heads and layers are repeated, and all
    layers and heads have equal shares of the blocks. For random weights, which have nothing to learn."""
    lent = HadsProfile.shipped("qwen2.5-coder-1.5b", 32768)
    layers, heads = np.arange(config.layers) % lent.layers, np.arange(config.q_heads) % lent.q_heads
    learned = ("features", "tokens", "distance", "sink", "sensitivity", "burstiness")
    shares = np.asarray(lent.free_shares)
    return dataclasses.replace(
        lent,
        **{name: np.asarray(getattr(lent, name))[layers][:, heads] for name in learned},
        layer_shares=np.broadcast_to(shares[:, None], (len(shares), len(layers))),
        head_shares=np.broadcast_to(shares[:, None, None], (len(shares), len(layers), len(heads))),
        kv_heads=config.kv_heads,
        model="random",
    )


def load(model: Any, dtype: str | None = None) -> Transformer:
    """A published model or a file, opened or not; in bfloat16; on a CPU, where bfloat16 is slower, in float32."""
    wanted = jnp.dtype(dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    return load_pretrained(model, dtype=wanted, param_dtype=wanted)


def own_profile(name: str, length: int, path: Path | None) -> HadsProfile:
    """The profile in a file, which must be of this model; without a file the one that comes with xsake."""
    if path is None:
        return HadsProfile.shipped(name, length)
    profile = HadsProfile.load(path)
    if profile.model != name:
        raise ValueError(f"{path} is the profile of {profile.model!r}, not of {name!r}: calibrate this model")
    return profile


def unseen(texts: Sequence[Text], profile: HadsProfile) -> Sequence[Text]:
    """The texts. Raises ValueError if one of them calibrated the profile."""
    if known := [text.name for text in texts if shared(text.tokens, profile.digests) > MOST_SHARED]:
        raise ValueError(f"the profile was calibrated on {known}: evaluate on other texts")
    return texts
