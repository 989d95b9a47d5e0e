"""Rewrite: a call that runs in place of a given call; and what runs a call by way of its rewrites.

A backend lists the kinds of rewrites that it wants, in order. Each kind looks at the call that the kinds before it
made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jaxtyping import Float

from xsake.backend.contract import Call
from xsake.backend.delta import DeltaParts


class Rewrite:
    """`call` runs in place of `given`. The other methods convert arguments and results; by default they return them
    unchanged.
    """

    def __init__(self, given: Call) -> None:
        self.given = given

    @property
    def call(self) -> Call:
        return self.given

    def around(self, run: Callable[..., tuple]) -> Callable[..., tuple]:
        """How `call` is run: `run` itself, or `run` on one part of the call after another."""
        return run

    def results(
        self, out: Float[Array, "B R h Dv"], lse: Float[Array, "B h R"]
    ) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
        """The results of the given call from those of `call`."""
        return out, lse

    def statistics(
        self, lse: Float[Array, "B H T"], delta: Float[Array, "B H T"] | DeltaParts, d_out: Float[Array, "B T H Dv"]
    ) -> tuple[Float[Array, "B h R"], Float[Array, "B h R"] | DeltaParts, Float[Array, "B R h Dv"]]:
        """The arguments of the backward of `call`, from those of the backward of the given call."""
        return lse, delta, d_out

    def gradients(self, d_query: Any, d_key: Any, d_value: Any) -> tuple[Any, Any, Any]:
        """The gradients of the given call from those of `call`."""
        return d_query, d_key, d_value


Kind = Callable[[Call], Rewrite | None]  # None: the call runs as it is


def forward(kinds: Sequence[Kind], call: Call, run: Callable[[Call], tuple]) -> tuple:
    """(output, lse) of a call, where `run(call)` computes those of the fully rewritten call."""
    if not kinds:
        return run(call)
    first, *others = kinds

    def run_others(call: Call) -> tuple:
        return forward(others, call, run)

    rewrite = first(call)
    return run_others(call) if rewrite is None else rewrite.results(*rewrite.around(run_others)(rewrite.call))


def backward(kinds: Sequence[Kind], call: Call, given: tuple[Any, Any, Any], run: Callable[..., tuple]) -> tuple:
    """Gradients of a call, where `run(call, lse, delta, d_out)` computes those of the fully rewritten call.

    `given` is (lse, delta, d_out). Gradients of query, key and value come first; a bias's, if any, stays as it is.
    """
    if not kinds:
        return run(call, *given)
    first, *others = kinds

    def run_others(call: Call, *given: Any) -> tuple:
        return backward(others, call, given, run)

    rewrite = first(call)
    if rewrite is None:
        return run_others(call, *given)
    d_query, d_key, d_value, *d_bias = rewrite.around(run_others)(rewrite.call, *rewrite.statistics(*given))
    return *rewrite.gradients(d_query, d_key, d_value), *d_bias


def shapes(kinds: Sequence[Kind], call: Call) -> Call:
    """The shapes of the fully rewritten call: a configuration is chosen before anything is computed."""
    for kind in kinds:
        if kind(call) is not None:
            call = jax.eval_shape(lambda call, kind=kind: kind(call).call, _shapes_of(call))
    return call


def _shapes_of(call: Call) -> Call:
    """Shapes alone, wherever the arrays lie: on the axes of a mesh, for instance."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), call)
