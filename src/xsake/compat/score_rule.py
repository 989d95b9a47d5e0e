"""What a FlexAttention `score_mod` does to a score, read from its traced program.

A score_mod that is recognised keeps or deletes each score by its indices, and maps the kept ones by

    cap * tanh((factor * score + bias[b, h, q_idx, kv_idx]) / cap)
    factor * score + bias[b, h, q_idx, kv_idx]                        without a cap
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

INDICES = ("b", "h", "q_idx", "kv_idx")
_SAMPLES = 256
_EXPRESSIBLE = (
    "Expressible: score * number, score + bias of any indices, cap * tanh(score / cap) as the last step, and "
    "jnp.where(condition of indices, score, -jnp.inf)"
)


@dataclasses.dataclass(frozen=True)
class OfIndices:
    """A value that the score does not enter, and the indices (0 to 3) that do."""

    value: Any
    of: frozenset[int] = frozenset()

    def number(self) -> float | None:
        """The value, if it is one number that is known while tracing."""
        if self.of or isinstance(self.value, jax.core.Tracer) or np.shape(self.value) != ():
            return None
        return float(self.value)

    @classmethod
    def made(cls, function: Callable, *given: OfIndices) -> OfIndices:
        return cls(function(*(x.value for x in given)), frozenset().union(*(x.of for x in given)))


@dataclasses.dataclass(frozen=True)
class ScoreRule:
    """keep ? outer * tanh(factor * score + bias) : -inf, or without `outer` keep ? factor * score + bias : -inf."""

    factor: float = 1.0
    bias: OfIndices | None = None
    outer: float | None = None
    keep: OfIndices | None = None

    def apply(self, score: Array) -> Array:
        score = self.factor * score if self.bias is None else self.factor * score + self.bias.value
        score = score if self.outer is None else self.outer * jnp.tanh(score)
        return score if self.keep is None else jnp.where(self.keep.value, score, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class Recognised:
    """A score_mod's rule. `rule_at(b, h, q_idx, kv_idx)` has its values at one place; `rule` has the rest."""

    rule: ScoreRule
    rule_at: Callable[..., ScoreRule]

    def part(self, name: str) -> Callable:
        """The function of (b, h, q_idx, kv_idx) that gives `bias` or `keep`, which the rule must have."""
        return lambda *place: getattr(self.rule_at(*place), name).value

    @classmethod
    def of(cls, score_mod: Callable, sizes: Sequence[int]) -> Recognised:
        """The rule of a score_mod for indices below `sizes`, held against the function at sampled places.

        Raises NotImplementedError, with the step's name, for what no rule expresses.
        """
        with jax.ensure_compile_time_eval():  # constants are numbers, also under a jit
            program = traced(score_mod, "score_mod", jnp.float32(0))
            rule_at = partial(_rule_of, program.jaxpr, program.consts)
            found = cls(rule_at(*(jnp.int32(0),) * 4), rule_at)
            _check(program, sizes)
        return found


def traced(function: Callable, name: str, *first: Any) -> ClosedJaxpr:
    """The program of a score_mod or mask_mod for scalars. Arrays that it closes over are the program's constants."""
    try:
        program = jax.make_jaxpr(function)(*first, *(jnp.int32(0),) * 4)
    except jax.errors.TracerArrayConversionError as error:
        raise TypeError(
            f"{name} must be written in jax.numpy, on arrays of JAX: wrap NumPy's in jnp.asarray"
        ) from error
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError) as error:
        raise TypeError(
            f"{name} must not branch in Python on its arguments, which are traced: use jnp.where. "
            f"JAX says: {str(error).splitlines()[0]}"
        ) from error
    if len(program.out_avals) != 1 or program.out_avals[0].shape != ():
        raise TypeError(
            f"{name} must return one scalar for scalar {'score and ' if first else ''}b, h, q_idx, kv_idx; it returns "
            f"{', '.join(map(str, program.out_avals))}"
        )
    return program


def indices_used(program: ClosedJaxpr) -> frozenset[int]:
    """Which of b, h, q_idx and kv_idx (0 to 3) a mask_mod's result depends on."""
    given = [OfIndices(jnp.int32(0), frozenset([i])) for i in range(4)]
    (out,) = _run(program.jaxpr, [OfIndices(x) for x in program.consts], given)
    return out.of


def over_indices(function: Callable, of: frozenset[int], sizes: Sequence[int]) -> Array:
    """`function(b, h, q_idx, kv_idx)`, of scalars, at every place. Dimensions of indices that are not in `of` are 1."""
    return at_places(function, *(jnp.arange(size if i in of else 1, dtype=jnp.int32) for i, size in enumerate(sizes)))


def at_places(function: Callable, *places: Array | np.ndarray) -> Array:
    """A function of four scalars for every combination of four vectors."""
    for i in reversed(range(4)):
        function = jax.vmap(function, in_axes=[0 if i == j else None for j in range(4)])
    return function(*places)


def _rule_of(program: Jaxpr, consts: Sequence[Any], *indices: Any) -> ScoreRule:
    given = [ScoreRule(), *(OfIndices(x, frozenset([i])) for i, x in enumerate(indices))]
    (out,) = _run(program, [OfIndices(x) for x in consts], given)
    if not isinstance(out, ScoreRule) or out.factor == 0 or out.outer == 0:
        raise _refusal("returns a value that does not depend on the score")
    if (dtype := _aval(program.outvars[0]).dtype) != jnp.float32:
        raise _refusal(f"returns {dtype} for a float32 score")
    return out


def _check(program: ClosedJaxpr, sizes: Sequence[int]) -> None:
    """The rule gives what the function gives. Arrays that are traced are replaced by random ones, in both."""
    rng = np.random.default_rng(0)
    consts = [_random_like(x, rng) if isinstance(x, jax.core.Tracer) else x for x in program.consts]
    places = [rng.integers(0, size, _SAMPLES).astype(np.int32) for size in sizes]
    for place, size in zip(places, sizes, strict=True):
        place[:2] = 0, size - 1
    score = jnp.asarray(rng.normal(size=_SAMPLES) * np.geomspace(0.1, 30, _SAMPLES), jnp.float32)

    def both(score: Array, *place: Array) -> tuple[Array, Array]:
        (wanted,) = jax.core.eval_jaxpr(program.jaxpr, consts, score, *place)
        return wanted, _rule_of(program.jaxpr, consts, *place).apply(score)

    wanted, got = (np.asarray(x) for x in jax.vmap(both)(score, *map(jnp.asarray, places)))
    if not np.allclose(got, wanted, rtol=1e-4, atol=1e-4, equal_nan=True):
        worst = int(np.argmax(~np.isclose(got, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)))
        where = dict(zip(INDICES, (int(x[worst]) for x in places), strict=True))
        raise _refusal(
            f"was read as a rule that gives {got[worst]} for score {score[worst]} at {where}, where the function gives "
            f"{wanted[worst]}"
        )


def _random_like(x: Any, rng: np.random.Generator) -> Array:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.asarray(rng.normal(size=x.shape), x.dtype)
    if x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.asarray(rng.integers(0, 2, x.shape), x.dtype)
    raise _refusal(f"reads a traced array of dtype {x.dtype}")


# -- the steps of a program ------------------------------------------------------------------------------------------


def _refusal(what: str) -> NotImplementedError:
    return NotImplementedError(f"score_mod {what}. {_EXPRESSIBLE}")


def _run(program: Jaxpr, consts: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    known: dict[Any, Any] = dict(zip((*program.constvars, *program.invars), (*consts, *given), strict=True))

    def read(x: Any) -> Any:
        return OfIndices(np.asarray(x.val, _aval(x).dtype)) if isinstance(x, Literal) else known[x]

    later = {*_operands(program.eqns), *(x for x in program.outvars if not isinstance(x, Literal))}
    for eqn in program.eqns:
        values = [read(x) for x in eqn.invars]
        if any(isinstance(x, ScoreRule) for x in values):
            known |= zip(eqn.outvars, _of_score(eqn, values), strict=True)
        else:
            operands, made = _operands([eqn]), [x for x in eqn.outvars if x in later]
            alone = program.replace(constvars=[], invars=operands, outvars=made, eqns=[eqn])
            of = frozenset().union(*(x.of for x in values))
            # What no index enters stays a number under a jit, unless the function took it from a traced array.
            with nullcontext() if of else jax.ensure_compile_time_eval():
                found = jax.core.eval_jaxpr(alone, [], *(known[x].value for x in operands))
            known |= {x: OfIndices(value, of) for x, value in zip(made, found, strict=True)}
    return [read(x) for x in program.outvars]


def _aval(x: Any) -> Any:
    return x.aval


def _operands(eqns: Sequence[JaxprEqn]) -> list[Any]:
    """The variables that are read, each once."""
    return list(dict.fromkeys(x for eqn in eqns for x in eqn.invars if not isinstance(x, Literal)))


def _of_score(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name in ("jit", "pjit", "closed_call"):
        inner: ClosedJaxpr = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
        return _run(inner.jaxpr, [OfIndices(x) for x in inner.consts], values)
    if name not in _STEPS or len(eqn.outvars) != 1 or _aval(eqn.outvars[0]).shape != ():
        raise _refusal(f"applies {name} to the score")
    return [_STEPS[name](eqn, *values)]


def _add(eqn: JaxprEqn, a: Any, b: Any) -> ScoreRule:
    if isinstance(a, OfIndices):
        a, b = b, a
    if isinstance(b, OfIndices) and b.number() == 0:
        return a
    if any(isinstance(x, ScoreRule) and x.outer is not None for x in (a, b)):
        raise _refusal(
            "adds to the score after tanh: a bias comes before the cap, and a mask is jnp.where(..., -jnp.inf)"
        )
    if isinstance(b, OfIndices):
        return dataclasses.replace(a, bias=_sum(a.bias, b))
    return ScoreRule(a.factor + b.factor, _sum(a.bias, b.bias), None, _both(a.keep, b.keep))


def _sub(eqn: JaxprEqn, a: Any, b: Any) -> ScoreRule:
    return _add(eqn, a, OfIndices.made(jnp.negative, b) if isinstance(b, OfIndices) else _neg(eqn, b))


def _neg(eqn: JaxprEqn, a: ScoreRule) -> ScoreRule:
    return _times(a, -1.0)


def _mul(eqn: JaxprEqn, a: Any, b: Any) -> ScoreRule:
    return _times(b, _number(a, "multiplies")) if isinstance(a, OfIndices) else _times(a, _number(b, "multiplies"))


def _div(eqn: JaxprEqn, a: Any, b: Any) -> ScoreRule:
    if isinstance(a, OfIndices):
        raise _refusal("divides by the score")
    divisor = _number(b, "divides")
    if divisor == 0:
        raise _refusal("divides the score by 0")
    return _times(a, 1 / divisor)


def _number(x: Any, does: str) -> float:
    if isinstance(x, ScoreRule):
        raise _refusal(f"{does} the score by itself")
    number = x.number()
    if number is None or not np.isfinite(number):
        by = " and ".join(INDICES[i] for i in sorted(x.of))
        by = f"something of {by}" if by else "a traced array" if number is None else number
        raise _refusal(f"{does} the score by {by}: only a number that is known while tracing can, so scale the query")
    return number


def _times(a: ScoreRule, number: float) -> ScoreRule:
    if a.keep is not None and number <= 0:
        raise _refusal(f"multiplies deleted scores, -inf, by {number}")
    if a.outer is not None:
        return dataclasses.replace(a, outer=a.outer * number)
    bias = None if a.bias is None else OfIndices(a.bias.value * np.float32(number), a.bias.of)
    return dataclasses.replace(a, factor=a.factor * number, bias=bias)


def _tanh(eqn: JaxprEqn, a: ScoreRule) -> ScoreRule:
    if a.outer is not None:
        raise _refusal("applies tanh twice")
    if a.keep is not None:
        raise _refusal("applies tanh to deleted scores, which become -1: delete them after the cap")
    return dataclasses.replace(a, outer=1.0)


def _select(eqn: JaxprEqn, which: Any, *cases: Any) -> ScoreRule:
    if isinstance(which, ScoreRule):
        raise _refusal("chooses by the score")
    if len(cases) != 2 or which.value.dtype != jnp.bool_:
        raise _refusal("chooses among more than two scores")
    no, yes = cases
    if isinstance(no, OfIndices):
        return _deleted(yes, which, no)
    if isinstance(yes, OfIndices):
        return _deleted(no, OfIndices.made(jnp.logical_not, which), yes)
    if (no.factor, no.outer) != (yes.factor, yes.outer):
        raise _refusal("caps or multiplies the score in some places only")
    bias, keep = no.bias, no.keep
    if not (no.bias is None and yes.bias is None):
        zero = OfIndices(jnp.float32(0))
        bias = OfIndices.made(jnp.where, which, yes.bias or zero, no.bias or zero)
    if not (no.keep is None and yes.keep is None):
        every = OfIndices(jnp.bool_(True))
        keep = OfIndices.made(jnp.where, which, yes.keep or every, no.keep or every)
    return ScoreRule(no.factor, bias, no.outer, keep)


def _deleted(rule: ScoreRule, keep: OfIndices, instead: OfIndices) -> ScoreRule:
    number = instead.number()
    if number != -np.inf:
        value = "a value" if number is None else number
        raise _refusal(f"puts {value} in the place of a score: only -jnp.inf can stand there")
    return dataclasses.replace(rule, keep=_both(rule.keep, keep))


def _cast(eqn: JaxprEqn, a: ScoreRule) -> ScoreRule:
    if eqn.params["new_dtype"] not in (jnp.float32, jnp.float64):
        raise _refusal(f"rounds the score to {eqn.params['new_dtype']}")
    return a


def _same(eqn: JaxprEqn, a: ScoreRule) -> ScoreRule:
    return a


def _sum(a: OfIndices | None, b: OfIndices | None) -> OfIndices | None:
    return a if b is None else b if a is None else OfIndices.made(jnp.add, a, b)


def _both(a: OfIndices | None, b: OfIndices | None) -> OfIndices | None:
    return a if b is None else b if a is None else OfIndices.made(jnp.logical_and, a, b)


_STEPS: dict[str, Callable] = {
    "add": _add,
    "sub": _sub,
    "neg": _neg,
    "mul": _mul,
    "div": _div,
    "tanh": _tanh,
    "select_n": _select,
    "convert_element_type": _cast,
    "copy": _same,
}
