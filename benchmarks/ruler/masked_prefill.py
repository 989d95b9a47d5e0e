"""Read prompts into a cache under a method's masks, in one piece and layer by layer.

A layer is three programs, as in `xsake.hads.study.layerwise`: only the choice of blocks differs from method to method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.hads.methods import METHODS
from benchmarks.ruler.prompt_layer import choose_blocks, forces, program_of
from xsake.hads.calibration.layerwise import Layers
from xsake.hads.profile.budgets import layer_counts
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.study.layerwise import attend, project
from xsake.model.generation.prefill import Prompt
from xsake.model.network.cache import KVCache


def read_masked(
    model: Any, prompts: Sequence[Sequence[int]], *, capacity: int, method: str, budget: float, profile: HadsProfile
) -> Prompt:
    """As `xsake.model.generation.prefill.read_prompts`, but with the masks of a method of the study.

    Every layer keeps as many blocks as HADS would keep there: exactly, for every prompt. The prompts are padded to the
    cache's `capacity`. Memory: a method's scores, [B, H, rows, n] for n blocks, and for XAttention [B, H, T/8, T/8].
    """
    program = program_of(method)
    adapt = METHODS[method].adapt
    known = dataclasses.replace(profile if adapt is None else adapt(profile), digests=())
    known = jax.tree.map(jnp.asarray, known)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    counts = np.stack([layer_counts(profile, budget, int(length)) for length in lengths], 1).astype(np.int32)
    padded = np.zeros((len(prompts), capacity), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    on_device = jnp.asarray(counts), jnp.asarray(lengths)
    layers, grid = Layers(model), profile.grid(capacity)
    x, rotation = layers.start(jnp.asarray(padded))
    keys, values, kept = [], [], []
    for number, weights in enumerate(layers.weights):
        inputs = project(layers.graph, weights, x, rotation, None)
        query, key, value = inputs
        blocks, count = choose_blocks(
            program, known, jnp.asarray(forces(method)), jnp.int32(number), query, key, *on_device
        )
        x = attend(layers.graph, model.attention_fn, weights, x, rotation, inputs, blocks, grid)
        keys.append(key)
        values.append(value)
        kept.append(count)
    if not (np.asarray(jnp.stack(kept)) == counts).all():
        raise ValueError(
            f"{method} at {budget:.0%} does not keep the blocks that the budget allows: {kept} of {counts}"
        )
    last = jnp.take_along_axis(x, (on_device[1] - 1)[:, None, None], 1)
    return Prompt(last, KVCache(keys=tuple(keys), values=tuple(values), length=on_device[1], filled=True), None)
