"""The times of choosing blocks and of attention on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.hads.study import Study
from xsake._measure.timing import seconds_per_call
from xsake.hads.profile.budgets import layer_counts
from xsake.hads.study import layerwise
from xsake.hads.study.methods.mask import MethodMask, causal_mask
from xsake.hads.study.texts import Text


def attention_times(
    study: Study, texts: Sequence[Text], pairs: Sequence[tuple[str, float]]
) -> dict[tuple[str, float], tuple[float, float]]:
    """(choice of blocks, attention) of each (method or "dense", budget), in milliseconds per sequence for all layers.

    Measured on the inputs of the middle layer for one batch of texts.
    """
    s, layers, attention = study.settings, study.layers, study.model.attention_fn
    number = len(layers.weights) // 2
    some = texts[: s.batch]
    x, rotation = layers.start(jnp.asarray(np.stack([text.tokens for text in some]), jnp.int32))
    inputs = layerwise.project(layers.graph, layers.weights[number], x, rotation, s.attention_dtype)
    profile = study.profile.on_device()
    known = study.knowledge(name for name, _ in pairs)
    dense = jax.jit(lambda q, k, v: attention(q, k, v, is_causal=True))
    sparse = jax.jit(lambda q, k, v, mask: attention(q, k, v, mask=mask))
    to_mask = jax.jit(lambda blocks: causal_mask(blocks, s.grid))
    milliseconds = 1e3 * len(layers.weights) / len(some)
    times = {}
    for name, budget in pairs:
        if name == "dense":
            times[name, budget] = 0.0, milliseconds * seconds(dense, *inputs)
            continue
        counts = layer_counts(profile, budget, s.length)
        choice = MethodMask.of(name, profile, counts, knowledge=known.get(name)), jnp.int32(number), *inputs[:2]
        blocks, *_ = layerwise.choose_blocks(*choice)
        choosing = seconds(layerwise.choose_blocks, *choice) + seconds(to_mask, blocks)
        times[name, budget] = (
            milliseconds * choosing,
            milliseconds * seconds(sparse, *inputs, to_mask(blocks)),
        )
    return times


def seconds(function: Callable[..., Any], *given: Any, calls: int = 20) -> float:
    """Per call, after a first call that compiles."""
    run = partial(function, *given)
    jax.block_until_ready(run())
    return seconds_per_call(run, calls)
