"""A traced program whose parts between marks are computed again in its backward pass.

A function that is not cut in layers keeps what all its layers compute for the backward pass. The calls of attention say
where a layer ends: between two of them only what crosses the mark is kept, and the rest is computed again. Parts that
the function itself checkpoints are left as they are.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

_NAME = "xsake.hads.mark"


def mark(x: Array) -> Array:
    return checkpoint_name(x, _NAME)


def run(program: Jaxpr, consts: Iterable[Any], *given: Any) -> list[Any]:
    """`jax.core.eval_jaxpr`, rematerialised between marks."""
    known = dict(zip((*program.constvars, *program.invars), (*consts, *given), strict=True))
    parts = _parts([_with_marks_inside(eqn) for eqn in program.eqns])
    for number, part in enumerate(parts):
        made = {x for eqn in part for x in eqn.outvars}
        read = [x for eqn in part for x in eqn.invars]
        later = [x for other in parts[number + 1 :] for eqn in other for x in eqn.invars]
        out, needed = _variables([*later, *program.outvars], made), _variables(read, known)
        piece = partial(jax.core.eval_jaxpr, program.replace(constvars=[], invars=needed, outvars=out, eqns=part), [])
        found = (jax.checkpoint(piece) if len(parts) > 1 else piece)(*(known[x] for x in needed))
        known |= zip(out, found, strict=True)
    return [x.val if isinstance(x, Literal) else known[x] for x in program.outvars]


def _variables(found: Iterable[Any], among: Container[Any]) -> list[Any]:
    """Those among others, each once."""
    return list(dict.fromkeys(x for x in found if not isinstance(x, Literal) and x in among))


def _parts(eqns: list[JaxprEqn]) -> list[list[JaxprEqn]]:
    """Cut after each mark."""
    parts: list[list[JaxprEqn]] = [[]]
    for eqn in eqns:
        parts[-1].append(eqn)
        if _is_mark(eqn):
            parts.append([])
    return [part for part in parts if part]


def _with_marks_inside(eqn: JaxprEqn) -> JaxprEqn:
    """A `jit`, or a scan over layers, whose own program is rematerialised if it has marks; others as they are."""
    inner = _inner(eqn)
    if inner is None:
        return eqn
    one = partial(run, inner.jaxpr, inner.consts)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in inner.in_avals]
    again = jax.make_jaxpr(jax.checkpoint(one) if eqn.primitive.name == "scan" else one)(*shapes)
    return eqn.replace(params=eqn.params | {"jaxpr": again})


def _inner(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The program of a `jit` or of a scan that has marks inside."""
    inner = eqn.params.get("jaxpr") if eqn.primitive.name in ("jit", "pjit", "scan") else None
    return inner if inner is not None and any(_is_mark(one) or _inner(one) for one in inner.jaxpr.eqns) else None


def _is_mark(eqn: JaxprEqn) -> bool:
    return bool(eqn.primitive.name == "name" and eqn.params["name"] == _NAME)
