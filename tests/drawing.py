"""Random arrays by NumPy: JAX compiles a program for every shape that it draws, a fifth of a second each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """float32 on the device; a NumPy array would choose other types under `jax.vmap` and in products."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def integers(seed: int, low: int, high: int, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, shape, np.int32))


def chances(seed: int, shape: tuple[int, ...], share: float) -> jax.Array:
    """Booleans, this share of them true."""
    return jnp.asarray(np.random.default_rng(seed).random(shape) < share)
