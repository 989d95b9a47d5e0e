"""A model that is cut in layers, watched one layer at a time: the states before a layer wait until it is learned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool

from xsake.hads.calibration.layerwise import Layers, run_asking, wait_on_device
from xsake.hads.calibration.observe import Observation, forward_block, observe_block, once, touch
from xsake.hads.calibration.sensitivity import cost_of_dropping
from xsake.hads.calibration.steps import Steps
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.rules import Rules

KeptBlocks = Callable[[int], Bool[Array, "one H rows n"]]  # of a layer


class ByLayer:
    """`whole.Watched` for a `Layered` model."""

    def __init__(self, model: Any, length: int):
        self._layers = layers = Layers(model)
        self.number, self.window, self.windowed = len(layers.chosen), layers.window, layers.windowed
        shapes = layers.shapes(length)
        kinds = zip(layers.graphs, layers.weights, layers.cut.windows, strict=True)
        for graph, weights, window in {(graph, window): (graph, w, window) for graph, w, window in kinds}.values():
            if (asked := _window(graph, weights, *shapes)) != window:
                raise ValueError(f"layers ask for a window of {asked}, and the model says window={window}")

    def checksums(self) -> list[str]:
        """A sum of each of the model's arrays: another model's, or those after more training, differ."""
        arrays = jax.tree.leaves((self._layers.cut.rest, self._layers.weights))
        return [str(jnp.sum(x, dtype=jnp.float32)) for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]

    def observe(
        self, tokens: Array | np.ndarray, grid: CausalGrid, steps: Steps, first: int
    ) -> Iterator[list[Observation]]:
        """The observations of all sequences, layer by layer from `first` on.

        The sequences' states wait on the host, or on a device with much room, and are kept by `steps`.
        """
        layers, shared = self._layers, None
        states: list[Array | np.ndarray] = []
        for row in tokens:
            x, shared = layers.start(jnp.asarray(row[None], jnp.int32), windowed=True)
            stay = wait_on_device(len(tokens), x)
            states.append(x if stay else np.asarray(x))
        if first:  # the layers before this one were learned by a run that was stopped
            bits = steps.get(f"states-{first}") or {}
            saved = [bits[str(n)].view(before.dtype) for n, before in enumerate(states)]
            states = [jnp.asarray(x) if stay else x for x in saved]

        def observed(number: int) -> list[Observation]:
            at = layers.chosen[number]
            alone = range(layers.chosen[number - 1] + 1 if number else 0, at)
            seen = []
            for n, before in enumerate(states):
                x, attention = jnp.asarray(before), layers.cut.attention_fn
                for other in alone:
                    x = forward_block(layers.graphs[other], attention, layers.weights[other], x, shared)
                x, one = observe_block(layers.graphs[at], attention, layers.weights[at], x, shared, grid)
                states[n] = x if stay else np.asarray(x)
                seen.append(one)
            steps.put(f"states-{number + 1}", {str(n): np.asarray(x).view(np.uint8) for n, x in enumerate(states)})
            return seen

        for number in range(first, self.number):
            yield observed(number)
            steps.drop(f"states-{number}")

    def costs(self, tokens: Array, kept: KeptBlocks, grid: CausalGrid, key: Array) -> np.ndarray:
        """f64[L, 2, H]: `cost_of_dropping` in each layer for one sequence."""
        rows = {at: row for row, at in enumerate(self._layers.chosen)}
        touched = touch(self._layers.model, tokens, key)
        found = {at: np.asarray(cost_of_dropping(one, kept(rows[at]), grid)) for at, one in touched if at in rows}
        return np.stack([found[at] for at in rows]).astype(np.float64)


def _window(graph: Any, weights: Any, x: Any, shared: Any) -> int | None:
    """The window for which a layer asks."""
    asked: list[Rules] = []

    def attend(query: Array, key: Array, value: Array, rules: Rules) -> Array:
        asked.append(rules)
        return jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)

    jax.eval_shape(lambda weights, x, shared: run_asking(graph, weights, x, shared, attend), weights, x, shared)
    return once(asked).window
