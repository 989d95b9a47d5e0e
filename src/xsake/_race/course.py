"""A course: one workload in one direction, and the data on which all contestants run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import xsake
from xsake._measure.chain import chain
from xsake.autotune.workloads import Workload

FORWARD, BOTH = DIRECTIONS = ("forward", "forward+backward")
FORWARDS = {FORWARD: 1.0, BOTH: 3.5}  # operations, as a multiple of the forward's


def in_direction(attend: Callable[..., Array], direction: str) -> Callable[..., Any]:
    """`attend`, or (output, gradients) with the output's cotangent as fourth argument."""

    def both(query: Array, key: Array, value: Array, d_out: Array, *rest: Any) -> tuple[Array, tuple[Array, ...]]:
        out, backward = jax.vjp(lambda *qkv: attend(*qkv, *rest), query, key, value)
        return out, backward(d_out)

    return attend if direction == FORWARD else both


class Course:
    """One program makes `calls` calls: by default several, if sequences are short; their kernels take less time than
    Python needs to launch them."""

    def __init__(
        self,
        workload: Workload,
        direction: str = FORWARD,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        calls: int | None = None,
    ):
        self.workload, self.direction, self.dtype = workload, direction, dtype
        self.calls = calls or (8 if workload.length <= 8192 else 1)

    @cached_property
    def inputs(self) -> tuple[Array, Array, Array]:
        return self.workload.inputs(self.dtype)

    @cached_property
    def cotangent(self) -> Array:
        query, _, value = self.inputs
        shape = (*query.shape[:-1], value.shape[-1])
        return jax.random.normal(jax.random.key(9), shape, jnp.float32).astype(self.dtype)

    @property
    def given(self) -> tuple[Array, ...]:
        return self.inputs if self.direction == FORWARD else (*self.inputs, self.cotangent)

    def program(self, attend: Callable[..., Array]) -> jax.stages.Wrapped:
        """`calls` calls under jit, of `attend` or of its gradients; takes `given` and what else `attend` takes."""
        if self.direction == FORWARD:
            return chain(attend, self.calls)
        both = in_direction(attend, BOTH)
        return chain(lambda *given: both(*given)[1], self.calls)

    def contestant(self, attend: Callable[..., Array], *rest: Any) -> Callable[[], Any]:
        return partial(self.program(attend), *self.given, *rest)

    def compiled(self, attend: Callable[..., Array], *rest: Any) -> Callable[[], Any]:
        """A contestant that is compiled now. Its `func` is the program, a jax.stages.Compiled."""
        return partial(self.program(attend).lower(*self.given, *rest).compile(), *self.given, *rest)

    def flops(self, mask: xsake.BlockMask | None = None) -> float:
        """Operations of one call, of active blocks only."""
        return FORWARDS[self.direction] * self.workload.flops(mask)


def compile_all(contestants: Iterable[Callable[[], Any]]) -> list[Any]:
    """Compile jitted contestants side by side, by a call each. Returns their results."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda run: jax.block_until_ready(run()), contestants))
