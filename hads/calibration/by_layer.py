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
from xsake.hads.calibration.observe import Observation, observe_block, touch
from xsake.hads.calibration.sensitivity import cost_of_dropping
from xsake.hads.calibration.steps import Steps
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.rules import Rules

KeptBlocks = Callable[[int], Bool[Array, "one H rows n"]]  # of a layer


class ByLayer:
    """`whole.Watched` for a `Layered` model."""

    def __init__(self, model: Any, length: int):
        self._layers = layers = Layers(model)
        self.number, self.window = len(layers.weights), layers.window
        x, shared = layers.shapes(length)
        asked: list[Rules] = []

        def attend(query: Array, key: Array, value: Array, rules: Rules) -> Array:
            asked.append(rules)
            return jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)

        jax.eval_shape(
            lambda weights, x, shared: run_asking(layers.graph, weights, x, shared, attend),
            layers.weights[0],
            x,
            shared,
        )
        if any(rules.window != self.window for rules in asked):
            raise ValueError(f"layers ask for a window of {asked[0].window}, and the model says window={self.window}")

    def checksums(self) -> list[str]:
        """A sum of each of the model's arrays: another model's, or those after more training, differ."""
        arrays = jax.tree.leaves((self._layers.cut.rest, self._layers.weights))
        return [str(jnp.sum(x, dtype=jnp.float32)) for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]

    def observe(
        self, tokens: Array | np.ndarray, grid: CausalGrid, steps: Steps, first: int
    ) -> Iterator[list[Observation]]:
        """Of each layer from `first` on, the observations of all sequences.

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
            seen = []
            for n, before in enumerate(states):
                given = layers.weights[number], jnp.asarray(before), shared
                x, one = observe_block(layers.graph, layers.cut.attention_fn, *given, grid)
                states[n] = x if stay else np.asarray(x)
                seen.append(one)
            steps.put(f"states-{number + 1}", {str(n): np.asarray(x).view(np.uint8) for n, x in enumerate(states)})
            return seen

        for number in range(first, self.number):
            yield observed(number)
            steps.drop(f"states-{number}")

    def costs(self, tokens: Array, kept: KeptBlocks, grid: CausalGrid, key: Array) -> np.ndarray:
        """f64[L, 2, H]: `cost_of_dropping` in each layer for one sequence."""
        touched = touch(self._layers.model, tokens, key)
        found = {at: np.asarray(cost_of_dropping(one, kept(at), grid)) for at, one in touched}
        return np.stack([found[at] for at in range(self.number)]).astype(np.float64)
