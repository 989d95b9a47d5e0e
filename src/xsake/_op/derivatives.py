"""Refuse the derivatives that the operation does not have, and differentiate its gradients.

A first derivative is taken in reverse mode. The "xla" implementation has second derivatives in forward mode, as
`jax.hessian` needs them (forward over reverse). All others are refused, with a message that says what to use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

_DENSE = "xsake.kernels_xla_ref.oracle.attention, which is dense and has all derivatives"


def reverse_mode_only(tree: Any) -> Any:
    """The same arrays. A tangent of one raises, unless it is transposed before anything computes it."""

    def guarded(x: Array) -> Array:
        traced = isinstance(x, jax.core.Tracer)
        return _reverse_mode_only(x) if traced and jnp.issubdtype(x.dtype, jnp.inexact) else x

    return jax.tree.map(guarded, tree)


@jax.custom_jvp
def _reverse_mode_only(x: Array) -> Array:
    return x


@_reverse_mode_only.defjvp
def _(primals: tuple, tangents: tuple) -> tuple:
    return primals[0], _tangent_to_transpose().bind(tangents[0])


def differentiable_again(run: Callable, plain: Callable | None, implementation: str) -> Callable:
    """`run`, with the forward-mode derivative of `plain`, which computes the same in plain XLA.

    Without `plain`, derivatives raise.
    """
    if plain is None:
        guard = _no_derivative()
        # Not custom_jvp: inside it, JAX does not lower kernels that keep a counter or sums in global memory.
        return lambda *given: run(*jax.tree.map(lambda x: guard.bind(x, implementation=implementation), given))
    again = jax.custom_jvp(run)

    @again.defjvp
    def jvp(primals: tuple, tangents: tuple) -> tuple:
        # The value apart from the derivative, which reverse mode would otherwise lose in the loop's.
        _, tangent = jax.jvp(plain, primals, tangents)
        return again(*primals), jax.tree.map(_forward_mode_only().bind, tangent)

    return again


@cache
def _tangent_to_transpose() -> Any:
    """The identity, which refuses to be computed: applied to tangents first, so forward mode meets it first."""
    from jax.extend.core import Primitive  # imports Pallas
    from jax.interpreters import ad, batching, mlir

    def refuse(*_: Any) -> Any:
        raise TypeError(
            f"xsake.attention has no forward-mode derivative: use jax.grad, jax.vjp or jax.jacrev instead of jax.jvp "
            f"and jax.jacfwd, or {_DENSE}"
        )

    identity = Primitive("xsake_tangent_to_transpose")
    identity.def_impl(refuse)
    identity.def_abstract_eval(lambda x: x)
    mlir.register_lowering(identity, refuse)
    batching.defvectorized(identity)
    ad.deflinear2(identity, lambda cotangent, x: [cotangent])
    return identity


@cache
def _no_derivative() -> Any:
    """The identity, which refuses to be differentiated: applied to inputs first, so derivatives meet it first."""
    from jax.extend.core import Primitive  # imports Pallas
    from jax.interpreters import ad, batching, mlir

    def refuse(primals: Any, tangents: Any, *, implementation: str) -> Any:
        raise NotImplementedError(
            f"implementation={implementation!r} has no second derivatives: use implementation='xla' with "
            f"jax.hessian or with jax.jvp of jax.grad, or {_DENSE}"
        )

    identity = Primitive("xsake_no_derivative")
    identity.def_impl(lambda x, **_: x)
    identity.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(identity, lambda context, x, **_: [x])
    batching.defvectorized(identity)
    ad.primitive_jvps[identity] = refuse
    return identity


@cache
def _forward_mode_only() -> Any:
    """The identity, which refuses to be transposed: applied to derivatives last, so reverse mode meets it first."""
    from jax.extend.core import Primitive  # imports Pallas
    from jax.interpreters import ad, batching, mlir

    def refuse(cotangent: Array, x: Any) -> list:
        raise NotImplementedError(
            f"xsake.attention has no second derivatives in reverse mode: instead of jax.grad or jax.jacrev of jax.grad "
            f"use jax.hessian, or jax.jvp or jax.jacfwd of jax.grad, or {_DENSE}"
        )

    identity = Primitive("xsake_forward_mode_only")
    identity.def_impl(lambda x: x)
    identity.def_abstract_eval(lambda x: x)
    mlir.register_lowering(identity, lambda context, x: [x])
    batching.defvectorized(identity)
    ad.deflinear2(identity, refuse)
    return identity
