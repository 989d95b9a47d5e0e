"""Rotary positions: features i and i + D/2 of a head are turned together by an angle that grows with the position."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


class Rotation(NamedTuple):
    """Cosines and sines of every position, computed once per forward and shared by its layers."""

    cos: Float[Array, "b T 1 half"]
    sin: Float[Array, "b T 1 half"]

    @classmethod
    def of(cls, positions: Int[Array, "b T"], head_dim: int, base: float) -> Rotation:
        frequency = base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
        angle = positions.astype(jnp.float32)[:, :, None, None] * frequency[None, None, None]
        return cls(jnp.cos(angle), jnp.sin(angle))

    def turn(self, x: Float[Array, "B T heads D"]) -> Float[Array, "B T heads D"]:
        """`x` turned by its positions, in float32: a bfloat16 angle is off by whole turns after some hundred tokens."""
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)
