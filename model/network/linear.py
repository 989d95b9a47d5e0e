"""Linear: a projection that is fast for one token, too."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from xsake._ground.device import platform_of

_ROWS = 8  # any number above one makes XLA multiply matrices


class Linear(nnx.Linear):
    """As nnx's, but on GPUs a single row is multiplied as one of several.

    XLA would write the row's products with all weights to memory, rounded to its dtype, and then add them up.
    """

    def __call__(self, inputs: Array, *args: Any, **options: Any) -> Array:
        if math.prod(inputs.shape[:-1]) != 1 or platform_of(inputs) != "gpu":
            return super().__call__(inputs, *args, **options)
        rows = jnp.pad(inputs.reshape(1, -1), ((0, _ROWS - 1), (0, 0)))
        return super().__call__(rows, *args, **options)[:1].reshape(*inputs.shape[:-1], -1)
