"""The memory that reading prompts takes: an estimate, made before anything is compiled or run.

The peaks that `benchmarks.gpu.prompt` recorded on an H200 are within a few percent of it.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

from xsake._ground.device import memory_limit
from xsake.hads import HadsProfile
from xsake.model.network.config import ModelConfig

_CHOICE_BYTES = 16  # per block of the grid: its logit, its key, and both of its row in order
_log = logging.getLogger("xsake")


class ReadingMemory(NamedTuple):
    """Bytes on one device."""

    weights: int
    cache: int
    activations: int

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        *,
        batch: int,
        length: int,
        capacity: int,
        chunk: int | None,
        itemsize: int,
        profile: HadsProfile | None = None,
    ) -> ReadingMemory:
        """The memory of `read_prompts` on one device, with arrays of `itemsize` bytes per number.

        In the MLP its two products and their combination live beside three arrays of the stream; in attention the
        queries before and after they are turned, the output, and keys and values twice, beside two.
        """
        tokens = min(chunk or length, length)
        mlp = 3 * config.mlp_width + 3 * config.width
        attention = 2 * config.width + (3 * config.q_heads + 4 * config.kv_heads) * config.head_dim
        choice = 0
        if profile is not None:
            choice = _CHOICE_BYTES * config.q_heads * -(-tokens // profile.block_q) * -(-length // profile.block)
        return cls(
            weights=itemsize * config.param_count(),
            cache=itemsize * 2 * config.layers * batch * capacity * config.kv_heads * config.head_dim,
            activations=batch * max(itemsize * tokens * mlp, itemsize * tokens * attention + choice),
        )

    @property
    def total(self) -> int:
        return sum(self)


def check_memory(
    config: ModelConfig,
    *,
    batch: int,
    length: int,
    capacity: int,
    chunk: int | None,
    itemsize: int,
    profile: HadsProfile | None = None,
    limit: int | None = None,
) -> None:
    """ValueError, with the chunk that would fit, if the prompts do not fit the first device, or `limit` bytes."""
    limit = limit or memory_limit()

    def needed(chunk: int | None) -> ReadingMemory:
        given = dict(batch=batch, length=length, capacity=capacity, itemsize=itemsize)
        return ReadingMemory.of(config, chunk=chunk, profile=profile, **given)

    now = needed(chunk)
    if now.total <= limit:
        return
    tokens = f"{batch} prompts of {length} tokens" if batch > 1 else f"a prompt of {length} tokens"
    told = (
        f"{tokens} needs about {_gb(now.total)} ({_gb(now.weights)} of weights, {_gb(now.cache)} of cache, "
        f"{_gb(now.activations)} to read {'in one piece' if chunk is None else f'{chunk} tokens at a time'}), and the "
        f"device has {_gb(limit)}"
    )
    unit = 64 if profile is None else profile.block_q
    size = unit * (1 << max((min(chunk or length, length) - 1) // unit, 1).bit_length() - 1)
    while size >= unit:
        if (fits := needed(size).total) <= limit:
            raise ValueError(f"{told}: read it in chunks, chunk={size} needs about {_gb(fits)}")
        size //= 2
    raise ValueError(f"{told}: no chunk is small enough; read fewer tokens, or fewer prompts at a time, or use a mesh")


def tell_beyond_calibration(profile: HadsProfile, length: int) -> None:
    """Log once that prompts are longer than the texts from which their profile was learned."""
    if length > profile.length:
        _tell_beyond(profile.model, profile.length)


@cache
def _tell_beyond(model: str, calibrated: int) -> None:
    _log.warning(
        "the profile of %r was calibrated on texts of %d tokens, and a prompt is longer: HADS judges farther blocks by "
        "the farthest that it knows. xsake calibrate --length makes a profile of longer texts",
        model,
        calibrated,
    )


def _gb(number: int) -> str:
    return f"{number / 1e9:.1f} GB"
