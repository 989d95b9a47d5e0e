"""A forward that is not cut, watched through its own derivative.

What a layer's attention does must leave the user's function, through any `jax.jit`, `jax.lax.scan`, `jax.checkpoint` or
`jax.vmap` around the layer. It leaves as a gradient: every call of attention takes a slot of zeros beside its inputs,
and the rule of its derivative says that the slot's gradient is the observation. A loop over layers with a traced number
takes the slot of that number, and its derivative puts each layer's observation in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

import xsake
from xsake.hads.calibration import rematerialise
from xsake.hads.calibration.by_layer import KeptBlocks
from xsake.hads.calibration.layerwise import split_windows
from xsake.hads.calibration.observe import CHUNK, Observation, Touched, observation, signed_likelihood
from xsake.hads.calibration.sensitivity import cost_of_dropping
from xsake.hads.calibration.steps import Steps
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.rules import Rules

Apply = Callable[[Callable[..., Array], Array], Float[Array, "B T vocab"]]
AT_ONCE = 1 << 32  # bytes of observations, of some layers and all sequences


@runtime_checkable
class Watched(Protocol):
    """A model during calibration: the layers for which HADS chooses, their number and window, what they do and feel;
    and the numbers of the other layers, which have a window."""

    number: int
    window: int | None
    windowed: tuple[int, ...]

    def checksums(self) -> list[str]:
        """Numbers that differ for another model, or after more training."""

    def observe(
        self, tokens: Array | np.ndarray, grid: CausalGrid, steps: Steps, first: int
    ) -> Iterator[list[Observation]]:
        """The observations of all sequences, layer by layer from `first` on."""

    def costs(self, tokens: Array, kept: KeptBlocks, grid: CausalGrid, key: Array) -> np.ndarray:
        """f64[L, 2, H]: `cost_of_dropping` in each layer for one sequence."""


class Whole:
    """`Watched` for `apply(attention, tokens) -> logits`."""

    def __init__(self, apply: Apply, length: int, layers: int | None):
        self._apply = apply
        self._calls: list[_Call] = []
        self._back: Callable | None = None
        logits = jax.eval_shape(partial(apply, self._note), jax.ShapeDtypeStruct((1, length), jnp.int32))
        shape = getattr(logits, "shape", None)
        if shape is None or shape[:2] != (1, length) or len(shape) != 3:
            raise ValueError(
                f"apply(attention, tokens) must give logits [1, {length}, vocab] for tokens [1, {length}]; "
                f"got {shape or type(logits)}"
            )
        count, windows = self._check(layers)
        self.window, self.windowed = split_windows(windows)
        self._count, self._chosen = count, [number for number in range(count) if number not in self.windowed]
        self.number = len(self._chosen)

    def _note(self, query: Any, key: Any, value: Any, *, layer: Any, **rules: Any) -> Array:
        if query.ndim != 4 or len(query) != 1:
            raise ValueError(f"attention takes [B, T, heads, D], here of one sequence; got a query of {query.shape}")
        number = None if isinstance(layer, jax.core.Tracer) else int(layer)
        self._calls.append(_Call(number, query.shape, key.shape, query.dtype, Rules.of(rules)))
        return jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)

    def _check(self, layers: int | None) -> tuple[int, list[int | None]]:
        """(layers, their windows). ValueError if the calls of attention are not those of one model's layers."""
        if not self._calls:
            raise ValueError(
                "apply(attention, tokens) never called attention: in each layer call the function that it is given, "
                "attention(query, key, value, layer=number)"
            )
        first = self._calls[0]
        if other := next((call for call in self._calls if call[1:3] != first[1:3]), None):
            raise NotImplementedError(
                f"layers differ in heads or tokens: queries and keys are {first.query} and {first.key} in the first, "
                f"{other.query} and {other.key} in layer {other.layer}"
            )
        numbers = [call.layer for call in self._calls]
        self._stacked = None in numbers
        if self._stacked and layers is None:
            raise ValueError(
                "layer is traced, as in a scan over layers, and cannot say how many layers there are: give layers="
            )
        found = layers if layers is not None else len(set(numbers))
        wrong = any(number is not None and not 0 <= number < found for number in numbers)
        if wrong or (not self._stacked and len(set(numbers)) != found):
            raise ValueError(f"attention was called for layers {numbers}: number {found} layers 0 to {found - 1}")
        windows = {call.rules.window for call in self._calls}
        if len(windows) == 1:
            return found, [first.rules.window] * found
        if self._stacked:
            raise NotImplementedError("layers of a scan differ in their windows: it cannot be seen which has which")
        of_layer = {call.layer: call.rules.window for call in self._calls}
        return found, [of_layer[number] for number in range(found)]

    def checksums(self) -> list[str]:
        """A sum of the logits of a sequence."""
        tokens = jnp.arange(self._calls[0].query[1], dtype=jnp.int32)[None] % 2
        return [str(jnp.sum(_hoisted(partial(self._apply, _dense), tokens)(tokens), dtype=jnp.float32))]

    def observe(
        self, tokens: Array | np.ndarray, grid: CausalGrid, steps: Steps, first: int
    ) -> Iterator[list[Observation]]:
        """The model runs once for as many layers as have AT_ONCE bytes of observations; they wait on the host."""
        call = self._calls[0]
        heads = (jax.ShapeDtypeStruct(shape, call.dtype) for shape in (call.query, call.key))
        shape = jax.eval_shape(partial(observation, grid=grid), *heads)
        together = layers_at_once(shape, len(tokens))
        rows = [jnp.asarray(row[None], jnp.int32) for row in tokens]
        for begin in range(first, self.number, together):
            group = self._chosen[begin : begin + together]
            run = _hoisted(partial(self._told, group, shape, partial(_observed, grid), jnp.sum), rows[0])
            told = [self._checked(group, jax.device_get(run(row))) for row in rows]
            for at in range(len(group)):
                yield [jax.tree.map(jnp.asarray, one[at]) for one in told]

    def costs(self, tokens: Array, kept: KeptBlocks, grid: CausalGrid, key: Array) -> np.ndarray:
        every = jnp.stack([kept(number) for number in range(self.number)])
        shape = jax.ShapeDtypeStruct((2, every.shape[2]), jnp.float32)

        def costs(tokens: Array, kept: Array, key: Array) -> list[_Told]:
            likelihood = partial(signed_likelihood, lambda logits: logits, key=key, chunk=CHUNK)
            rows = None if self._stacked else {layer: row for row, layer in enumerate(self._chosen)}
            return self._told(self._chosen, shape, partial(_felt, grid, kept, rows), likelihood, tokens)

        given = tokens, every, key
        self._back = self._back or _hoisted(costs, *given)  # one program for all sequences
        return np.stack([np.asarray(one.seen, np.float64) for one in self._back(*given)])

    def _told(
        self, group: list[int], shape: Any, attend: Callable[..., Array], of_logits: Callable, tokens: Array
    ) -> list[_Told]:
        """What each layer of the group told in `attend`, in arrays of this shape."""

        def slot(*lead: int) -> _Told:
            return _Told(jnp.zeros(lead), jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape), x.dtype), shape))

        def run(slots: Any) -> Array:
            take = partial(_slot_of_number if self._stacked else _slot_of_layer, slots, group)
            function = partial(self._apply, partial(attend, take))
            program = jax.make_jaxpr(function)(tokens)
            (logits,) = rematerialise.run(program.jaxpr, program.consts, tokens)
            return of_logits(logits.astype(jnp.float32))

        if not self._stacked:
            return list(jax.grad(run)({number: slot() for number in group}).values())
        told = jax.grad(run)(slot(len(group)))
        return [jax.tree.map(partial(_entry, at), told) for at in range(len(group))]

    def _checked(self, group: list[int], told: list[_Told]) -> list[Any]:
        for number, one in zip(group, told, strict=True):
            if one.calls != 1:
                raise ValueError(
                    f"attention was called {one.calls:.0f} times for layer {number}: the layers' numbers must be 0 to "
                    f"{self._count - 1}, each once in a forward"
                )
        return [one.seen for one in told]


def layers_at_once(observed: Any, sequences: int) -> int:
    """How many layers' observations, of this shape and of all sequences, may wait on the host."""
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(observed))
    return max(AT_ONCE // (size * sequences), 1)


class _Call(NamedTuple):
    """A call of attention as it is traced; the layer's number is None where it is traced too."""

    layer: int | None
    query: tuple[int, ...]
    key: tuple[int, ...]
    dtype: Any
    rules: Rules


class _Told(NamedTuple):
    """What a slot's gradient tells: how often the layer called attention, and what was seen there."""

    calls: Float[Array, ""]
    seen: Any


@jax.custom_vjp
def _tell(out: Array, slot: _Told, told: _Told) -> Array:
    """`out`; the slot's gradient is `told`."""
    return out


_tell.defvjp(lambda out, slot, told: (out, told), lambda told, gradient: (gradient, told, None))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tell_cost(grid: CausalGrid, out: Array, slot: _Told, qkv: tuple[Array, Array, Array], kept: Array) -> Array:
    """`out`; the slot's gradient is the cost of dropping the blocks that are not kept."""
    return out


def _cost(grid: CausalGrid, given: tuple, gradient: Array) -> tuple:
    (query, key, value), kept = given
    cost = cost_of_dropping(Touched(query, key, value, gradient), kept, grid)
    return gradient, _Told(jnp.ones(()), jnp.stack(cost)), None, None


_tell_cost.defvjp(lambda grid, out, slot, qkv, kept: (out, (qkv, kept)), _cost)


# `take(layer) -> (slot, wanted)` finds a slot; a layer outside the group is not wanted.


def _slot_of_layer(slots: dict[int, _Told], group: list[int], layer: Any) -> tuple[_Told | None, bool]:
    return slots.get(int(layer)), int(layer) in group


def _slot_of_number(slots: _Told, group: list[int], layer: Any) -> tuple[_Told, Array]:
    place = jnp.asarray(layer, jnp.int32) - group[0]
    wanted = (place >= 0) & (place < len(group))
    return jax.tree.map(partial(_entry, jnp.clip(place, 0, len(group) - 1)), slots), wanted


def _entry(at: Any, x: Array) -> Array:
    return x[at]


def _observed(
    grid: CausalGrid, take: Callable, query: Array, key: Array, value: Array, *, layer: Any, **given: Any
) -> Array:
    rules = Rules.of(given)
    out = xsake.attention(query, key, value, **rules.arguments())
    slot, wanted = take(layer)
    if slot is None:
        return out
    told = partial(observation, rules.scaled(query), key, grid)
    if wanted is not True:
        none = jax.tree.map(jnp.zeros_like, slot.seen)
        told = partial(jax.lax.cond, wanted, told, lambda: none)
    return _tell(out, slot, _Told(jnp.asarray(wanted, jnp.float32), jax.lax.stop_gradient(told())))


def _felt(
    grid: CausalGrid,
    kept: Array,
    rows: dict[int, int] | None,
    take: Callable,
    query: Array,
    key: Array,
    value: Array,
    *,
    layer: Any,
    **given: Any,
) -> Array:
    """`rows` has the place of each layer in `kept`; None where a layer's number, maybe traced, is its place."""
    rules = Rules.of(given)
    out = xsake.attention(query, key, value, **rules.arguments())
    slot, _ = take(layer)
    if slot is None:
        return out
    row = layer if rows is None else rows[int(layer)]
    out = _tell_cost(grid, out, slot, (rules.scaled(query), key, value), kept[row])
    return rematerialise.mark(out)


def _dense(query: Array, key: Array, value: Array, *, layer: Any, **given: Any) -> Array:
    return xsake.attention(query, key, value, **Rules.of(given).arguments())


def _hoisted(function: Callable, *given: Any) -> Callable:
    """`function` as a program for arguments like `given`. Arrays that it closes over, such as weights, are arguments of
    the program: as constants they would be compiled into it."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*given)
    tree = jax.tree.structure(shape)
    run = jax.jit(jax.core.eval_jaxpr, static_argnums=0)

    def call(*given: Any) -> Any:
        return jax.tree.unflatten(tree, run(closed.jaxpr, closed.consts, *jax.tree.leaves(given)))

    return call
