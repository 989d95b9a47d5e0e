"""The memory that a calibration needs, by the compiler's own count of each of its programs: nothing is run.

The compiler of the present backend is asked. A GPU's or TPU's count is that of its own programs; a CPU takes fewer rows
of logits at a time than an accelerator, which may add a few gigabytes (`block_statistics.scan_rows`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xsake.hads.calibration import observe
from xsake.hads.calibration.calibrate import _gains
from xsake.hads.calibration.fit import STEPS, fit_weights
from xsake.hads.calibration.layerwise import Layers
from xsake.hads.calibration.sensitivity import cost_of_dropping
from xsake.hads.calibration.tables import AT_ONCE
from xsake.hads.profile.causal_grid import CausalGrid


class Memory(NamedTuple):
    """Bytes: of the model's weights, of what else is on the device during each stage, and of the host's arrays."""

    weights: int
    stages: dict[str, int]
    host: int

    @property
    def device(self) -> int:
        """The most that is on the device at a time."""
        return self.weights + max(self.stages.values())


def needed(model: Any, *, length: int, sequences: int, block: int = 64, block_q: int | None = None) -> Memory:
    """Of `calibrate` with `sequences` of `length` tokens. The model may hold shapes in place of arrays."""
    layers = Layers(model)
    grid = CausalGrid.of(length, block, block_q, layers.window)
    first = layers.chosen[0]
    graph, weights, attention = layers.graphs[first], layers.weights[first], layers.cut.attention_fn
    x, shared = layers.shapes(length)
    key = jax.eval_shape(lambda: jax.random.key(0))

    def run(program: Any, *given: Any, beside: int = 0) -> tuple[Any, int]:
        """(the program's results, what it needs on the device beside the model's weights)"""
        found = program.lower(*given).compile().memory_analysis()
        return program.eval_shape(*given), (
            found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes + beside
        )

    watched = graph, attention, weights, x, shared, grid
    (_, seen), watch = run(observe.observe_block, *watched, beside=size(x))
    every = jax.tree.map(lambda one: jax.ShapeDtypeStruct((sequences, *one.shape[1:]), one.dtype), seen)
    pooled, share = every.pooled, every.statistics.mass
    all_seen = size(every)
    estimator, fit = run(fit_weights, pooled, share, grid, STEPS, beside=all_seen + size((pooled, share)))
    (estimator, _) = estimator
    of_head = jax.ShapeDtypeStruct((share.shape[1],), jnp.float32)
    _, gains = run(_gains, seen, estimator, of_head, of_head, grid, beside=all_seen + size((pooled, share)))
    _, forward = run(observe.forward_block, graph, attention, weights, x, shared, beside=size(x))
    _, likelihood = run(
        observe.likelihood_gradient, layers.cut.logits, layers.cut.rest, x, key, observe.CHUNK, beside=size(x)
    )
    (_, touched), back = run(observe.touch_block, *watched[:5], x, beside=2 * size(x))
    kept = jax.ShapeDtypeStruct(seen.statistics.mass.shape, jnp.bool_)
    _, cost = run(cost_of_dropping, touched, kept, grid, beside=size((touched, kept, x)))
    stages = {
        "dense attention of a layer": watch + all_seen,
        "fit of a layer": max(fit, gains),
        "forward": forward,
        "gradient of the likelihood": likelihood,
        "backward of a layer": back,
        "cost of dropping blocks": cost,
    }
    free = 4 * share.shape[1] * (grid.blocks - grid.forced_blocks)
    chosen, depth = len(layers.chosen), len(layers.weights)
    host = free * sequences * chosen + 3 * min(AT_ONCE, sequences) * free * chosen + size(x) * (sequences + depth)
    return Memory(size(jax.tree.leaves(model)), stages, host)


def size(tree: Any) -> int:
    """Bytes of all arrays."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
