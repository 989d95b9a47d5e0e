"""The checks that every backend passes, by group and name, for tests and for `xsake check`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xsake._op import registry
from xsake._op.arguments import build_call
from xsake.backend.contract import Call
from xsake.testing import cases
from xsake.testing.case import Case, attend, collect, make, problems, run, with_grads
from xsake.testing.reference import Results
from xsake.testing.target import Target

FORWARD, GRADIENTS = ("out", "lse"), ("d_query", "d_key", "d_value", "d_bias", "d_sinks")


class NotHere(NotImplementedError):
    """The check cannot run on this machine."""


class Unsteady(AssertionError):
    """Runs of one program gave different results."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """Run a case by an implementation, and compare every result with float64.

    `how` runs it, with gradients if the case wants them, `given` is what the implementation gets in place of the case's
    own inputs, and `then` asserts more about the results. `quick` checks are those of `xsake check --quick`, and about
    `programs` programs are compiled.
    """

    group: str
    name: str
    case: Callable[[Target], Case]
    how: Callable[[Target, Case], Results] = run
    given: Callable[[Target, Case], Case] = lambda target, case: case
    then: Callable[[Target, Case, Results], None] = lambda target, case, results: None
    quick: bool = False
    dtype: str | None = None  # that the check needs
    programs: int = 1

    @property
    def title(self) -> str:
        return f"{self.group}: {self.name}"

    def problems(self, target: Target, *, forward_only: bool = False) -> dict[str, str]:
        """What is wrong with each result."""
        case = self.case(target)
        results = self.how(target, self.given(target, case).replace(gradients=not forward_only))
        found = problems(case, results)
        if not found:
            self.then(target, case, results)
        return found

    def run(self, target: Target) -> None:
        """AssertionError with everything that is wrong."""
        found = self.problems(target)
        assert not found, "\n".join(found.values())


# -- how a case is run -------------------------------------------------------------------------------------------------


def _with_room(target: Target, case: Case) -> Results:
    return run(target, case, mask=case.mask_with_room())


def four_times(target: Target, case: Case) -> Results:
    """`Unsteady` where runs of one program differ in a bit."""
    first, *others = (run(target, case) for _ in range(4))
    for name, *found in zip(Results._fields, first, *others, strict=True):
        if found[0] is not None:
            for other in found[1:]:
                try:
                    chex.assert_trees_all_equal(found[0].view(np.uint8), other.view(np.uint8))
                except AssertionError as error:
                    raise Unsteady(f"{name} differs between two runs of one program") from error
    return first


def vmapped(target: Target, case: Case) -> Results:
    """One example per call, under `jax.vmap`: each with its own mask."""
    examples = range(case.query.shape[0])
    masks = [case.replace(blocks=case.blocks[i : i + 1]).mask_with_room() for i in examples]
    mask = jax.tree.map(lambda *xs: jnp.stack(xs), *masks)
    inputs, cotangents = jax.tree.map(lambda x: x[:, None], (case.inputs, case.cotangents))

    @jax.jit
    @jax.vmap
    def one(inputs: dict, mask: Any, cotangents: tuple | None) -> Any:
        return with_grads(lambda x: attend(target, x, mask, {}, **case.options), inputs, cotangents)

    with target.context():
        found = one(inputs, mask, cotangents)
    results, grads = jax.tree.map(lambda x: x[:, 0], found)
    return collect(case, results, grads)


def on_mesh(target: Target, case: Case) -> Results:
    """On two devices, each of which computes half of the heads."""
    if jax.device_count() < 2:
        raise NotHere("there is one device")
    mesh = Mesh(np.array(jax.devices()[:2]), ("heads",))
    spec = NamedSharding(mesh, P(None, None, "heads"))
    laid = jax.device_put((case.inputs, case.cotangents), spec)
    mask = case.mask()

    @jax.jit
    def everything(inputs: dict, cotangents: tuple | None) -> Any:
        return with_grads(lambda x: attend(target, x, mask, {}, **case.options), inputs, cotangents)

    with target.context():
        results, grads = everything(*laid)
    return collect(case, results, grads)


# -- configurations ----------------------------------------------------------------------------------------------------


def call_of(target: Target, case: Case) -> Call:
    """The call that the backend gets for a case."""
    blocks = registry.get(target.name).default_blocks(case.query.shape[1], case.key.shape[1], case.query.shape[3])
    return build_call(**case.inputs, **case.rest, **case.options, mask=case.mask(), default_blocks=blocks)


def space_of(target: Target, case: Case) -> list[Any]:
    """The search space for a case, without repetitions; AssertionError where it breaks the contract."""
    backend, call = registry.get(target.name), call_of(target, case)
    space = list(dict.fromkeys(backend.search_space(call)))
    default = backend.default_config(call)
    assert all(isinstance(c, backend.Config) for c in [*space, default]), "configurations must be instances of Config"
    assert default in space, "search_space must have default_config's configuration"
    with target.context():
        for config in space:
            reason = backend.misfit(call, config)
            assert reason is None, f"search_space has {config}, of which misfit says: {reason}"
    return space


def _last_configuration(target: Target, case: Case) -> Results:
    return run(target, case, config=space_of(target, case)[-1])


def _every_configuration(target: Target, case: Case) -> Results:
    """AssertionError for the first configuration that changes a result."""
    space = space_of(target, case)
    for config in space[1:]:
        found = problems(case, run(target, case, config=config))
        assert not found, f"{config}: {'; '.join(found.values())}"
    return run(target, case, config=space[0])


def small(target: Target) -> Case:
    options: dict[str, Any] = dict(q_len=75, batch=1, q_heads=2, kv_heads=1, mask=(1, 2), mask_causal=True, density=0.8)
    return make(target, **options)


# -- what must be exactly so -------------------------------------------------------------------------------------------


def _zero(results: Results, where: Any, *names: str) -> None:
    for name in names:
        value = getattr(results, name)
        zero = value is None or (value[where] == 0).all()
        assert zero, f"{name} must be 0 in rows or keys that take no part"


def _empty(target: Target, case: Case, results: Results) -> None:
    rows = np.s_[:, 2 * case.block_q : 3 * case.block_q, 0]
    for index in (rows, np.s_[:, :, 1]):
        _zero(results, index, "out", "d_query")
        assert (results.lse[index] == -np.inf).all(), "lse of an empty row must be -inf"
    _zero(results, np.s_[:, case.block_kv : 2 * case.block_kv], "d_key", "d_value")


def _empty_with_sinks(target: Target, case: Case, results: Results) -> None:
    rows = np.s_[:, case.block_q : 2 * case.block_q]
    _zero(results, rows, "out", "d_query")
    sinks = case.arguments["sinks"].astype(np.float64).reshape(case.query.shape[2], -1)
    expected = np.broadcast_to(np.log(np.exp(sinks).sum(-1)), results.lse[rows].shape)
    right = np.allclose(results.lse[rows], expected, rtol=1e-6, atol=1e-6)
    assert right, "lse of an empty row must be the logsumexp of its sinks"


def _padding_is_zero(target: Target, case: Case, results: Results) -> None:
    """Tokens with a negative segment id, or at or past the length."""
    a = case.arguments
    ids = a.get("segment_ids")
    pairs = zip(("query", "key"), ids if isinstance(ids, tuple) else (ids, ids), strict=True)
    for (side, of_side), grads in zip(pairs, (("out", "d_query"), ("d_key", "d_value")), strict=True):
        padding = np.zeros(getattr(case, side).shape[:2], bool)
        if of_side is not None:
            padding |= of_side < 0
        lengths = a.get("query_seq_lengths" if side == "query" else "key_value_seq_lengths")
        if lengths is not None:
            padding |= np.arange(padding.shape[1]) >= lengths[:, None]
        _zero(results, padding, *grads)


def _infinite_rows(target: Target, case: Case, results: Results) -> None:
    assert (results.lse[:, 5:20] == -np.inf).all(), "lse of a row whose bias is -inf must be -inf"


def _length_zero(target: Target, case: Case, results: Results) -> None:
    _zero(results, 0, "out", "d_query")
    assert (results.lse[0] == -np.inf).all(), "lse of a row without keys must be -inf"


def _nothing(target: Target, case: Case, results: Results) -> None:
    for name, value in zip(Results._fields, results, strict=True):
        if value is not None:
            assert (value == (-np.inf if name == "lse" else 0)).all(), f"{name} where nothing attends"


def _finite(target: Target, case: Case, results: Results) -> None:
    assert np.isfinite(results.out).all(), "out must be finite"


# -- padding: the reference's inputs are clean, and cotangents of padding's output do nothing --------------------------


def _clean(target: Target, name: str) -> Case:
    case, of_queries, _ = cases.padded(target, name)
    d_out = case.d_out.copy()
    d_out[of_queries] = 0
    return case.replace(d_out=d_out)


def padding(name: str, value: float, *, quick: bool = False) -> Check:
    def given(target: Target, case: Case) -> Case:
        return cases.poisoned(*cases.padded(target, name), value)

    return Check(
        group="padding",
        name=f"{value} in {name}",
        case=partial(_clean, name=name),
        given=given,
        then=_padding_is_zero,
        quick=quick,
    )


# -- the list ----------------------------------------------------------------------------------------------------------

_QUICK = {
    "masks": {"no mask", "very unequal heads"},
    "heads": {"group of three"},
    "rules": {"causal mask, many full blocks", "unaligned window of the call", "window within a block"},
    "lengths": {"length 1", "more keys"},
    "arguments": {"scale", "soft cap", "sinks"},
}
RULES_OF_POSITIONS: tuple = ((True, None), (False, (9, 30)), (True, 25), (False, (9, 2**40)))
HALVES = [("bfloat16", 1.0), ("float16", 1.0), ("bfloat16", 4.0), ("float16", 4.0)]


def _halves() -> list[Check]:
    made: list[Check] = []
    case: Callable[..., Case]
    for dtype, spread in HALVES:
        case = partial(cases.half_precision, dtype=dtype, spread=spread)
        name = f"{dtype}, logits times {spread**2:g}"
        made.append(Check(group="dtypes", name=name, case=case, dtype=dtype, quick=(dtype, spread) == ("bfloat16", 1)))
    for dtype in ("float32", "bfloat16", "float16"):
        case = partial(cases.everything, dtype=dtype)
        name = f"everything at once in {dtype}"
        made.append(Check(group="dtypes", name=name, case=case, dtype=dtype, quick=dtype == "float32"))
    case = cases.beyond_float16
    return [*made, Check(group="dtypes", name="logits beyond float16", case=case, dtype="float16")]


def _checks() -> list[Check]:
    def check(group: str, name: str, case: Callable[..., Case], **options: Any) -> Check:
        return Check(group=group, name=name, case=case, **options)

    made = [
        check(group, name, partial(cases.of_table, group=group, name=name), quick=name in _QUICK[group])
        for group, table in cases.TABLES.items()
        for name in table
    ]
    for shape in np.ndindex(2, 2, 2, 2):
        axes = " x ".join(name if whole == 0 else "1" for name, whole in zip("BHTS", shape, strict=True))
        made.append(check("bias", axes, partial(cases.bias, shape=shape), quick=shape == (1, 0, 0, 0)))
    made.append(check("bias", "-inf masks elements and whole rows", cases.infinite_bias, then=_infinite_rows))
    padded: dict[str, Any] = dict(then=_padding_is_zero)
    made += [
        check("segments", "one array", partial(cases.segment_ids, one_array=True), **padded, quick=True),
        check("segments", "of queries and of keys", partial(cases.segment_ids, one_array=False), **padded),
        check("segments", "any integers", cases.any_segment_ids, **padded),
        check("segments", "lengths of queries and keys", cases.lengths_of_both, **padded, quick=True),
        check("segments", "a length of zero", cases.length_zero, then=_length_zero),
    ]
    for is_causal, window in RULES_OF_POSITIONS:
        case = partial(cases.positions, is_causal=is_causal, window=window)
        name = f"is_causal={is_causal}, window={window}"
        made.append(check("positions", name, case, quick=(is_causal, window) == (True, 25)))
    made += [
        check("positions", "with the mask's own rule", cases.positions_and_rule),
        check("positions", "a chunk of a cache", cases.chunk_of_a_cache),
        check("positions", "one token, no mask", partial(cases.decode, mask=None)),
        check("positions", "one token", partial(cases.decode, mask=(1, 4))),
        check("rows", "empty rows, heads and columns", cases.empty_rows, how=_with_room, then=_empty, quick=True),
        check("rows", "nothing attends", cases.nothing_attends, then=_nothing),
        check("rows", "large logits", cases.large_logits, then=_finite, quick=True),
    ]
    for sinks in ((4,), (4, 3)):
        case = partial(cases.empty_rows_with_sinks, sinks=sinks)
        made.append(check("rows", f"empty rows with sinks {sinks}", case, then=_empty_with_sinks))
    made += [
        padding(name, np.nan, quick=name == cases.PADDED) for name in (cases.PADDED, "lengths", "segments", "no mask")
    ]
    made.append(padding(cases.PADDED, np.inf))
    made += _halves()
    plain = partial(make, q_len=39, kv_len=70, density=0.8)
    halved = partial(plain, mask=(1, 4), mask_causal=True)
    made += [
        check("determinism", "four runs", partial(make, density=0.8), how=four_times, quick=True),
        check("vmap", "a mask per example", partial(plain, mask=(2, 4)), how=vmapped, quick=True),
        check("meshes", "heads over two devices", halved, how=on_mesh, quick=True),
        check("configurations", "the last of the search space", small, how=_last_configuration, quick=True),
        check("configurations", "the whole search space", small, how=_every_configuration, programs=60),
    ]
    return made


CHECKS: dict[str, Check] = {check.title: check for check in _checks()}
GROUPS = tuple(dict.fromkeys(check.group for check in CHECKS.values()))


def checks_of(target: Target, *, quick: bool = False) -> list[Check]:
    """The checks that apply to a target's precisions."""
    return [c for c in CHECKS.values() if (c.quick or not quick) and c.dtype in (None, *target.dtypes)]
