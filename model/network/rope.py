"""Rotary positions: features i and i + D/2 of a head are turned together by an angle that grows with the position."""

from __future__ import annotations

import dataclasses
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
        gain = config.rope_gain
        return cls(jnp.cos(angle) * gain, jnp.sin(angle) * gain) if gain != 1 else cls(jnp.cos(angle), jnp.sin(angle))

    def turn(self, x: Float[Array, "B T heads D"]) -> Float[Array, "B T heads D"]:
        """`x` turned by its positions, in float32: a bfloat16 angle is off by whole turns after some hundred tokens."""
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)


Rotations = dict[str, Rotation]  # by the names of `ModelConfig.rotary_of`


def rotations(positions: Int[Array, "b T"], config: ModelConfig) -> Rotations:
    """The rotations of these positions that the layers of a model have."""
    configs = {"full": config}
    if config.window_rope_base is not None:
        base = config.window_rope_base
        configs["window"] = dataclasses.replace(config, rope_base=base, rope_factor=1.0, rope_gain=1.0)
    return {name: Rotation.of(positions, each) for name, each in configs.items()}


def frequencies(config: ModelConfig) -> Float[Array, "half"]:
    """Angle per token of each pair of features, in radians."""
    plain = config.rope_base ** (-jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    return plain if config.rope_factor == 1 else plain / divisors(config, plain)


def divisors(config: ModelConfig, frequency: Float[Array, "half"]) -> Float[Array, "half"]:
    """The number by which each frequency is divided: 1 if it is fast, `rope_factor` if it is slow."""
    if config.rope_scaling == "linear":
        return jnp.full_like(frequency, config.rope_factor)
    if config.rope_scaling == "yarn":
        fast = _fast_by_yarn(config)
    else:
        turns = config.rope_context * frequency / (2 * math.pi)
        fast = jnp.clip((turns - config.rope_low) / (config.rope_high - config.rope_low), 0, 1)
    return 1 / ((1 - fast) / config.rope_factor + fast)


def _fast_by_yarn(config: ModelConfig) -> Float[Array, "half"]:
    """How fast each pair of features counts: a line over the pairs' numbers, between the two bounds of turns."""
    count = config.head_dim // 2

    def pair_of(turns: int | float) -> float:
        """The pair that turns so many times in the context, as a fraction."""
        return count * math.log(config.rope_context / (2 * math.pi * turns)) / math.log(config.rope_base)

    first = max(math.floor(pair_of(config.rope_high)), 0)
    last = min(math.ceil(pair_of(config.rope_low)), config.head_dim - 1)
    width = max(last - first, 1e-3)
    return 1 - jnp.clip((jnp.arange(count, dtype=jnp.float32) - first) / width, 0, 1)


def yarn_gain(factor: int | float) -> float:
    """YaRN's `rope_gain`, where a file names none."""
    return 0.1 * math.log(factor) + 1
