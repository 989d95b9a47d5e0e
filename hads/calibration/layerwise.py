"""Run a model layer by layer: one small compiled program for all layers, in place of one as large as the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

import xsake
from xsake.hads.selection.rules import Rules

Attend = Callable[..., Array]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Layered:
    """A forward that is cut in layers, so that `calibrate` has one layer at a time on the device.

    Give this to `calibrate`, or a model with a method `layered()` that returns it, in place of a whole forward.

    Args:
      rest: the weights outside the layers, a pytree of arrays.
      start: `start(rest, tokens) -> (x, shared)`: the first layer's input [B, T, width], and what every layer is given
        beside it: a pytree of arrays, such as rotary positions.
      layers: each layer's weights, pytrees of arrays that are alike.
      layer: `layer(weights, x, shared, attention) -> x`. It calls `attention(query, key, value, **rules)` once, and is
        compiled once for all layers: a function that can be hashed, and that equals itself in the next call. Or one
        such function per layer: those that are equal are compiled once.
      logits: `logits(rest, x)`: [B, t, vocab] of some tokens' last states [B, t, width].
      window: tokens that a token sees in every layer, itself among them; None for all. Or one such number per layer.
      attention_fn: dense attention, by the names of `xsake.attention`.
    """

    rest: Any
    start: Callable[[Any, Any], tuple[Array, Any]]
    layers: Sequence[Any]
    layer: Callable[[Any, Array, Any, Attend], Array] | Sequence[Callable[[Any, Array, Any, Attend], Array]]
    logits: Callable[[Any, Array], Array]
    window: int | Sequence[int | None] | None = None
    attention_fn: Callable[..., Any] = xsake.attention

    def __call__(self, attention: Attend, tokens: Int[Array, "B T"]) -> Float[Array, "B T vocab"]:
        """The whole forward, with `attention(query, key, value, layer=number, **rules)`."""
        x, shared = self.start(self.rest, tokens)
        for number, (weights, layer) in enumerate(zip(self.layers, self.functions, strict=True)):
            x = layer(weights, x, shared, partial(attention, layer=number))
        return self.logits(self.rest, x)

    @property
    def functions(self) -> list[Callable[[Any, Array, Any, Attend], Array]]:
        return [self.layer] * len(self.layers) if callable(self.layer) else list(self.layer)

    @property
    def windows(self) -> list[int | None]:
        one = self.window is None or isinstance(self.window, int)
        return [self.window] * len(self.layers) if one else list(self.window)  # type: ignore[arg-type,list-item]


class Layers:
    """A model's layers for compiled programs: each layer's function (`graphs`) and its `weights`.

    `window` is that of all layers; where some have one and others none, `windowed` has the numbers of the former and
    `chosen` of the latter, for which HADS chooses. Otherwise it chooses for all.
    """

    def __init__(self, model: Any):
        self.model = model
        self.cut: Layered = model if isinstance(model, Layered) else model.layered()
        self.graphs, self.weights, windows = self.cut.functions, self.cut.layers, self.cut.windows
        self.window, self.windowed = split_windows(windows)
        self.chosen = [number for number in range(len(windows)) if number not in self.windowed]
        self._least = min((window for window in windows if window is not None), default=None)

    @property
    def graph(self) -> Any:
        """The function that all layers share. ValueError if they do not."""
        if any(other != self.graphs[0] for other in self.graphs):
            raise ValueError("the model's layers are not alike: they cannot share a program")
        return self.graphs[0]

    def start(self, tokens: Int[Array, "B T"], *, windowed: bool = False) -> tuple[Float[Array, "B T width"], Any]:
        """The first layer's input, and what every layer is given.

        NotImplementedError if the model has a window within the tokens, unless the caller honours windows.
        """
        if self._least is not None and self._least < tokens.shape[1] and not windowed:
            raise NotImplementedError(
                f"this model's attention has a window of {self._least} tokens"
                f"{'' if self.window else ' in some layers'}, which is not modelled here: use sequences of at most "
                f"{self._least} tokens, not {tokens.shape[1]}"
            )
        return self.cut.start(self.cut.rest, tokens)

    def shapes(self, length: int) -> tuple[Any, Any]:
        """The shapes of `start` for a sequence; the model may hold shapes in place of arrays."""
        return jax.eval_shape(self.cut.start, self.cut.rest, jax.ShapeDtypeStruct((1, length), jnp.int32))


def split_windows(windows: Sequence[int | None]) -> tuple[int | None, tuple[int, ...]]:
    """(the window of the layers for which HADS chooses, the numbers of those with a window that it leaves alone)."""
    if len(set(windows)) == 1:
        return windows[0], ()
    if None not in windows:
        raise NotImplementedError(f"layers differ in their windows, {sorted(set(map(str, windows)))}: HADS knows one")
    return None, tuple(number for number, window in enumerate(windows) if window is not None)


def wait_on_device(count: int, x: Array) -> bool:
    """Whether `count` arrays like `x` are little beside the device's memory: then they need not wait on the host, from
    where they come back more slowly than a block runs. A device that does not tell its memory keeps none."""
    room = (next(iter(x.devices())).memory_stats() or {}).get("bytes_limit", 0)
    return count * x.nbytes <= room // 8


def run_block(graph: Any, weights: Any, x: Array, shared: Any, attend: Attend) -> Array:
    """One layer's output, with `attend(query, key, value)` in place of its attention."""
    return graph(weights, x, shared, lambda query, key, value, **rules: attend(query, key, value))


def run_asking(graph: Any, weights: Any, x: Array, shared: Any, attend: Callable[..., Array]) -> Array:
    """`run_block`, with `attend(query, key, value, rules)`."""

    def asked(query: Array, key: Array, value: Array, *, layer: Any = None, **rules: Any) -> Array:
        return attend(query, key, value, Rules.of(rules))

    return graph(weights, x, shared, asked)
