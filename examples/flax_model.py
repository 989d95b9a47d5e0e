"""A Flax model of your own with block-sparse attention: one argument of its attention layers.

python examples/flax_model.py

A small transformer, written with `nnx.MultiHeadAttention`, learns this file by heart: once with Flax's attention, once
with the same attention by xsake, once with a mask that leaves most blocks out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import xsake
from xsake.model import attention_fn

LENGTH, WIDTH, VOCAB = 256, 64, 128
TEXT = jnp.asarray(list(Path(__file__).read_bytes()))


class Layer(nnx.Module):
    def __init__(self, attention: Callable[..., jax.Array], rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(
            num_heads=4,
            in_features=WIDTH,
            decode=False,
            rngs=rngs,
            attention_fn=attention,  # <- this is the switch
        )
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.mlp = nnx.Sequential(nnx.Linear(WIDTH, 128, rngs=rngs), nnx.gelu, nnx.Linear(128, WIDTH, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x), is_causal=True)
        return x + self.mlp(self.norms[1](x))


class Model(nnx.Module):
    def __init__(self, layers: int, attention: Callable[..., jax.Array], rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(attention, rngs) for _ in range(layers)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.places(jnp.arange(LENGTH))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(layers: int, steps: int, attention: Callable[..., jax.Array]) -> list[float]:
    model = Model(layers, attention, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer, key: jax.Array) -> jax.Array:
        starts = jax.random.randint(key, (8, 1), 0, len(TEXT) - LENGTH)
        tokens = TEXT[starts + jnp.arange(LENGTH + 1)]

        def loss(model: Model) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return [float(step(model, optimizer, key)) for key in jax.random.split(jax.random.key(1), steps)]


def main(layers: int = 2, steps: int = 60) -> dict[str, list[float]]:
    window = xsake.patterns.sink_window(LENGTH, LENGTH, sink=16, window=32, block_q=16, block_kv=16)
    sparse = partial(attention_fn, block_mask=window)
    losses = {
        "flax": train(layers, steps, nnx.dot_product_attention),
        "xsake": train(layers, steps, attention_fn),
        f"xsake, {float(window.density()):.0%} of the blocks": train(layers, steps, sparse),
    }
    for name, values in losses.items():
        print(f"{name:<28} loss {values[0]:.4f} at the first step, {values[-1]:.4f} at the last")
    return losses


if __name__ == "__main__":
    main()
