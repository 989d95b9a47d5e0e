"""Conditions in Hopper kernels, in a form that JAX lowers quickly.

`lax.cond`, and so `pl.when`, converts its condition to a number. For every conversion of a bool, JAX 0.11 and 0.12
start the assembler to ask for its version: 60 times about 10 ms in a gradient. A selection between 0 and 1 does not.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def as_number(condition: Any) -> jax.Array:
    """1 where the condition holds, else 0; a scalar i32."""
    return lax.select(condition, jnp.int32(1), jnp.int32(0))


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """As `pl.when`: runs the decorated function where the scalar condition holds."""

    def run(function: Callable[[], None]) -> None:
        lax.switch(as_number(condition), (lambda: None, function))

    return run


def run_where(run: Callable[[], None], *conditions: Any) -> None:
    """Calls `run` where all conditions hold; None always holds."""
    known = [condition for condition in conditions if condition is not None]
    when(functools.reduce(operator.and_, known))(run) if known else run()
