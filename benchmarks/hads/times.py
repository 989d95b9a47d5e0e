"""The times of choosing blocks and of attention on this machine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.hads.study import Study
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
    profile = jax.tree.map(jnp.asarray, dataclasses.replace(study.profile, digests=()))
    known = study.knowledge(name for name, _ in pairs)
    dense = jax.jit(lambda q, k, v: attention(q, k, v, is_causal=True))
    sparse = jax.jit(lambda q, k, v, mask: attention(q, k, v, mask=mask))
    to_mask = jax.jit(lambda blocks: causal_mask(blocks, s.block, s.length))
    milliseconds = 1e3 * len(layers.weights) / len(some)
    times = {}
    for name, budget in pairs:
        if name == "dense":
            times[name, budget] = 0.0, milliseconds * seconds_per_call(dense, *inputs)
            continue
        counts = layer_counts(profile, budget, s.length)
        choice = MethodMask.of(name, profile, counts, knowledge=known.get(name)), jnp.int32(number), *inputs[:2]
        blocks, *_ = layerwise.choose_blocks(*choice)
        choosing = seconds_per_call(layerwise.choose_blocks, *choice) + seconds_per_call(to_mask, blocks)
        times[name, budget] = (
            milliseconds * choosing,
            milliseconds * seconds_per_call(sparse, *inputs, to_mask(blocks)),
        )
    return times


def seconds_per_call(run: Callable, *args: Any, repeats: int = 20) -> float:
    """The mean over `repeats` calls, of which only the last is waited for."""
    jax.block_until_ready(run(*args))
    start = time.perf_counter()
    jax.block_until_ready([run(*args) for _ in range(repeats)][-1])
    return (time.perf_counter() - start) / repeats
