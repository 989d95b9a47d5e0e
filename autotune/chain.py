"""Several calls as one program: a short kernel is then timed on the device, not by how fast Python launches it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def chain(function: Callable, calls: int) -> jax.stages.Wrapped:
    """A jitted function of the same arguments that calls `function` `calls` times in turn and returns the last result.

    Every call is tied to the one before it, so that none can be merged, moved or dropped; and they are one loop,
    because calls side by side are merged in spite of that.
    """

    def chained(*args: Any) -> Any:
        if calls == 1:
            return function(*args)
        shapes = jax.eval_shape(function, *args)
        first = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return lax.fori_loop(0, calls, lambda _, last: function(*lax.optimization_barrier((args, last))[0]), first)

    return jax.jit(chained)
