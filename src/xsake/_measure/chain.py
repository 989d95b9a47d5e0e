"""Several calls as one program, so that timing a short kernel measures the device, not Python's launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def chain(function: Callable, calls: int) -> jax.stages.Wrapped:
    """A jitted function of the same arguments that calls `function` `calls` times in turn and returns the last result.

    An optimization barrier makes each call depend on the call before, so that XLA cannot merge, move or drop a call.
    The calls are one loop: XLA merges unrolled calls in spite of the barrier.
    """

    def chained(*args: Any) -> Any:
        if calls == 1:
            return function(*args)
        shapes = jax.eval_shape(function, *args)
        first = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return lax.fori_loop(0, calls, lambda _, last: function(*lax.optimization_barrier((args, last))[0]), first)

    return jax.jit(chained)
