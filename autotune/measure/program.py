"""The program of one candidate, to be lowered, compiled and timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from xsake._measure.chain import chain
from xsake._op import registry
from xsake.backend.contract import RESULTS, Call

_GRADIENTS = RESULTS["backward"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One direction of an implementation in a configuration, called `calls` times. Another process can build it too."""

    implementation: str
    direction: str
    config: Any
    calls: int

    def function(self) -> jax.stages.Wrapped:
        """A jitted function of (call) for the forward, and of (call, lse, delta, d_out) for gradients."""
        return chain(self._once(), self.calls)

    def _once(self) -> Callable:
        """The compiler drops the gradients that `direction` does not return, and their kernels."""
        backend = registry.get(self.implementation)
        if self.direction == "forward":
            return lambda call: backend.forward(call, self.config)
        wanted = [_GRADIENTS.index(name) for name in RESULTS[self.direction]]

        def backward(call: Call, lse: Array, delta: Array, d_out: Array) -> list[Array | None]:
            grads = backend.backward(call, self.config, lse, delta, d_out, with_bias=False)
            return [grads[i] for i in wanted]

        return backward
