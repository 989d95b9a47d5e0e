"""Rotary positions: features i and i + D/2 of a head are turned together by an angle that grows with the position."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from xsake.model.network.config import ModelConfig


class Rotation(NamedTuple):
    """Cosines and sines of every position, computed once per forward and shared by its layers."""

    cos: Float[Array, "b T 1 half"]
    sin: Float[Array, "b T 1 half"]

    @classmethod
    def of(cls, positions: Int[Array, "b T"], config: ModelConfig) -> Rotation:
        angle = positions.astype(jnp.float32)[:, :, None, None] * frequencies(config)[None, None, None]
        return cls(jnp.cos(angle), jnp.sin(angle))

    def turn(self, x: Float[Array, "B T heads D"]) -> Float[Array, "B T heads D"]:
        """`x` turned by its positions, in float32: a bfloat16 angle is off by whole turns after some hundred tokens."""
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def frequencies(config: ModelConfig) -> Float[Array, "half"]:
    """Angle per token of each pair of features, in radians."""
    plain = config.rope_base ** (-jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    return plain if config.rope_factor == 1 else plain / divisors(config, plain)


def divisors(config: ModelConfig, frequency: Float[Array, "half"]) -> Float[Array, "half"]:
    """The number by which Llama 3 divides each frequency: 1 if it is fast, `rope_factor` if it is slow."""
    turns = config.rope_context * frequency / (2 * math.pi)
    fast = jnp.clip((turns - config.rope_low) / (config.rope_high - config.rope_low), 0, 1)
    return 1 / ((1 - fast) / config.rope_factor + fast)
