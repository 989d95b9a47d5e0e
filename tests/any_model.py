"""A tiny causal model as pure functions, in the forms in which users write theirs: a loop, a scan, mapped, cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake import hads

LAYERS, VOCAB, WIDTH, HEADS, KV_HEADS, DIM, LENGTH, BLOCK = 2, 61, 16, 4, 2, 8, 90, 8
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(2, LENGTH)).astype(np.int32)


def weights(seed: int = 0) -> dict[str, Any]:
    """`layers` are stacked; the scale is far from that of an initial model, so that attention is not uniform."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape) * 1.5 * shape[-2] ** -0.5

    layers = {
        "qkv": draw(LAYERS, WIDTH, (HEADS + 2 * KV_HEADS) * DIM),
        "out": draw(LAYERS, HEADS * DIM, WIDTH),
        "up": draw(LAYERS, WIDTH, 2 * WIDTH),
        "down": draw(LAYERS, 2 * WIDTH, WIDTH),
    }
    given = {"layers": layers, "embed": draw(VOCAB, WIDTH) * 4, "place": draw(LENGTH, WIDTH) * 8}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), given)


def start(w: dict[str, Any], tokens: Array) -> tuple[Array, tuple]:
    return w["embed"][tokens] + w["place"][None, : tokens.shape[1]], ()


def layer(w: dict[str, Array], x: Array, shared: Any, attention: Callable[..., Array], **rules: Any) -> Array:
    """`attention(query, key, value, **rules)`."""
    qkv = (_normal(x) @ w["qkv"]).reshape(*x.shape[:2], -1, DIM)
    query, key, value = jnp.split(qkv, (HEADS, HEADS + KV_HEADS), 2)
    x = x + attention(query, key, value, is_causal=True, **rules).reshape(*x.shape[:2], -1) @ w["out"]
    return x + jax.nn.gelu(_normal(x) @ w["up"]) @ w["down"]


def logits(w: dict[str, Any], x: Array) -> Array:
    return _normal(x) @ w["embed"].T


def _normal(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def each(w: dict[str, Any]) -> list[dict[str, Array]]:
    return [jax.tree.map(lambda x, n=n: x[n], w["layers"]) for n in range(LAYERS)]


def loop(w: dict[str, Any], attention: Callable[..., Array], tokens: Array) -> Array:
    x, _ = start(w, tokens)
    for number, one in enumerate(each(w)):
        x = layer(one, x, (), attention, layer=number)
    return logits(w, x)


def rematerialised(w: dict[str, Any], attention: Callable[..., Array], tokens: Array) -> Array:
    """Each layer is checkpointed, and the whole is jitted."""

    @jax.jit
    def run(w: Any, tokens: Array) -> Array:
        x, _ = start(w, tokens)
        for number, one in enumerate(each(w)):
            x = jax.checkpoint(partial(layer, shared=(), attention=attention, layer=number))(one, x)
        return logits(w, x)

    return run(w, tokens)


def scan(w: dict[str, Any], attention: Callable[..., Array], tokens: Array) -> Array:
    """One body for all layers, whose number is traced."""

    def body(x: Array, given: tuple[Any, Array]) -> tuple[Array, None]:
        return layer(given[0], x, (), attention, layer=given[1]), None

    x, _ = start(w, tokens)
    return logits(w, jax.lax.scan(body, x, (w["layers"], jnp.arange(LAYERS)))[0])


def mapped(w: dict[str, Any], attention: Callable[..., Array], tokens: Array) -> Array:
    """Each sequence alone, under `vmap`."""
    return jax.vmap(lambda row: loop(w, attention, row[None])[0])(tokens)


def cut(w: dict[str, Any]) -> hads.Layered:
    return hads.Layered(rest=w, start=start, layers=each(w), layer=layer, logits=logits)
