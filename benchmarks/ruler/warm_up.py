"""Compile every program of a run side by side, before the first prompt: one after the other they would take minutes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.ruler.way import Way, read
from xsake.hads.profile.profile import HadsProfile
from xsake.model.generation.generation import write
from xsake.model.generation.prefill import Prompt
from xsake.model.generation.sampling import Sampler
from xsake.model.network.cache import KVCache

_AT_ONCE = 8
_TOKENS = 1 << 18  # of all prompts that are read at once: each holds its cache and a layer's activations


def warm_up(
    model: Any,
    *,
    ways: Sequence[Way],
    lengths: Sequence[int],
    profile_for: Callable[[int], HadsProfile | None],
    batch: int,
    chunk: int | None,
) -> None:
    """Read one batch of prompts in every way, and write two tokens, at every length. The results are thrown away."""
    at_once = max(1, min(_AT_ONCE, _TOKENS // (batch * max(lengths))))
    with ThreadPoolExecutor(at_once) as pool:
        jobs: list[Callable[[], None]] = [partial(_write, model, length, batch) for length in lengths]
        jobs += [
            partial(_read, model, way, length, profile_for(length), batch, chunk) for length in lengths for way in ways
        ]
        for one in [pool.submit(job) for job in jobs]:
            one.result()


def _read(model: Any, way: Way, length: int, profile: HadsProfile | None, batch: int, chunk: int | None) -> None:
    prompts = [[0] * length] * batch
    jax.block_until_ready(read(model, prompts, way, capacity=length, profile=profile, chunk=chunk).last)


def _write(model: Any, length: int, batch: int) -> None:
    empty = KVCache.empty(model.config, batch=batch, capacity=length, dtype=model.dtype)
    cache = dataclasses.replace(empty, length=jnp.ones(batch, jnp.int32), filled=True)
    last = jnp.zeros((batch, 1, model.config.width), model.dtype)
    for _ in write(model, Prompt(last, cache, None), [jax.random.key(0)] * 2, Sampler()):
        pass
