"""What a program really does on given inputs, counted: no clock, so a slow or busy machine changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vmap_call",
    "checkpoint",
    "custom_partitioning",
)


def counting_matmul_flops(function: Callable) -> Callable[..., jax.Array]:
    """A compiled function of the same arguments that counts the floating-point operations of all matrix products that
    run. A product in a loop counts once per iteration.

    >>> def power(x, n):
    ...     return jax.lax.fori_loop(0, n, lambda _, y: y @ x, x)
    >>> [int(counting_matmul_flops(power)(jnp.ones((4, 4)), n)) for n in (1, 3)]
    [128, 384]
    """

    @jax.jit
    def count(*args: Any) -> jax.Array:
        return _run(jax.make_jaxpr(function)(*args), jax.tree.leaves(args))[1]

    return count


def _run(program: Any, args: list) -> tuple[list, Any]:
    """(results, operations) of a program, equation by equation."""
    jaxpr, flops = program.jaxpr, jnp.float32(0)
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*program.consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        results, more = _equation(eqn, [read(atom) for atom in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
        flops = flops + more
    return [read(atom) for atom in jaxpr.outvars], flops


def _equation(eqn: Any, args: list) -> tuple[list, Any]:
    name, params = eqn.primitive.name, eqn.params
    if name == "while":
        return _while(params, args)
    if name == "cond":
        branches = [lambda *x, b=branch: _run(b, list(x)) for branch in params["branches"]]
        return jax.lax.switch(args[0], branches, *args[1:])
    if name in _CALLS:
        return _run(_inner(params), args)
    if name in ("shard_map", "pallas_call"):
        raise NotImplementedError(f"operations inside {name} are not counted")
    results = eqn.primitive.bind(*args, **params)
    return list(results) if eqn.primitive.multiple_results else [results], jnp.float32(_flops_known_ahead(eqn))


def _flops_known_ahead(eqn: Any) -> int:
    """The operations of an equation whose cost does not depend on values; a scan counts `length` times."""
    name, params = eqn.primitive.name, eqn.params
    assert name not in ("while", "cond"), f"{name} in a scan is not counted"
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
    if name == "scan" or name in _CALLS:
        return params.get("length", 1) * sum(map(_flops_known_ahead, _inner(params).eqns))
    return 0


def _inner(params: Any) -> Any:
    return next(p for p in params.values() if isinstance(p, core.ClosedJaxpr))


def _while(params: Any, args: list) -> tuple[list, Any]:
    ends = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_condition, of_body, state = args[: ends[0]], args[ends[0] : ends[1]], args[ends[1] :]

    def go_on(carry: tuple[list, Any]) -> Any:
        return _run(params["cond_jaxpr"], [*of_condition, *carry[0]])[0][0]

    def body(carry: tuple[list, Any]) -> tuple[list, Any]:
        results, flops = _run(params["body_jaxpr"], [*of_body, *carry[0]])
        return results, carry[1] + flops

    return jax.lax.while_loop(go_on, body, (state, jnp.float32(0)))
