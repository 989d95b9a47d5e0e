"""The function and the mask that `--attention` stands for.

A mask function is a callable that is also a pytree, so that it is an argument of the compiled step: a recalibration
changes its arrays without compiling anew, and a checkpoint can hold them.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array

import xsake
from xsake import BlockMask, patterns
from xsake._ground.device import compute_capability
from xsake.hads.mask.row_shards import RowShards
from xsake.model.network.attend import MaskFn
from xsake.model.training.config import TrainConfig


@partial(jax.tree_util.register_dataclass, data_fields=("mask",), meta_fields=())
@dataclasses.dataclass(frozen=True)
class FixedMask:
    """One mask for every layer, of the whole sequence or, as `shard_rows` gives it, cut already."""

    mask: BlockMask | RowShards

    def __call__(self, layer: int, query: Array, key: Array) -> BlockMask | RowShards:
        return self.mask


def _window(sinks: int, length: int, block: int, size: int) -> BlockMask:
    """A window of `size` blocks, and the first `sinks` blocks."""
    return patterns.sink_window(length, length, sink=sinks * block, window=size * block, block_q=block, block_kv=block)


def _big_bird(length: int, block: int, size: int) -> BlockMask:
    sizes: dict[str, Any] = dict(block_q=block, block_kv=block, window=block, num_global=block)
    return patterns.big_bird(length, length, num_random_blocks=size, seed=0, **sizes)


# Masks grow denser with `size`, which runs from 0 to the number of blocks per row.
_FAMILIES: dict[str, Callable[[int, int, int], BlockMask]] = {
    "sink_window": partial(_window, 1),
    "sliding_window": partial(_window, 0),
    "big_bird": _big_bird,
}
ATTENTION = ("dense", "cudnn", "hads", "random", *_FAMILIES)

# Tokens per block, the best for the kernels first; short sequences need small blocks to have a low density.
BLOCKS = (128, 64, 32, 16)
NEAR = 0.25  # of the density that is asked for: a pattern whose density differs by more is refused


def fixed_pattern(name: str, *, length: int, block: int, density: float) -> BlockMask:
    """The mask of pattern `name` whose share of active causal blocks is nearest to `density`.

    >>> float(fixed_pattern("sink_window", length=1024, block=64, density=0.43).density().round(2))
    0.43
    """
    if name == "random":
        diagonal = 2 / (-(-length // block) + 1)  # always on: a token attends at least to itself
        sizes: dict[str, Any] = dict(density=max(density, diagonal), block_q=block, block_kv=block)
        return patterns.random(length, length, seed=0, is_causal=True, **sizes)
    make = partial(_FAMILIES[name], length, block)
    windows = range(-(-length // block) + 1)
    above = min(bisect.bisect_left(windows, density, key=lambda size: float(make(size).density())), len(windows) - 1)
    nearest = (make(size) for size in windows[max(above - 1, 0) : above + 1])
    return min(nearest, key=lambda mask: abs(float(mask.density()) - density))


def _cudnn(*arrays: Array, **options: Any) -> Array:
    return jax.nn.dot_product_attention(*arrays, implementation="cudnn", **options)


def check_cudnn(config: TrainConfig) -> None:
    """Raise ValueError if cuDNN cannot compute the attention of this configuration here."""
    if compute_capability() is None:
        raise ValueError(
            f'attention="cudnn" needs an NVIDIA GPU, and JAX runs on {jax.default_backend()} here: use "dense"'
        )
    if config.dtype != "bfloat16":
        raise ValueError(f'attention="cudnn" needs dtype="bfloat16", not {config.dtype!r}: use "dense"')


def hads_recalibration(config: TrainConfig) -> Callable[[int, Any, Array], MaskFn]:
    """HADS at the configuration's density. ValueError if the blocks that are always on leave none to choose."""
    from xsake.hads.calibration.recalibration import recalibration

    _check_hads(config)
    if jax.process_count() > 1:
        raise ValueError('attention="hads" calibrates within one process: give the trainer a recalibrate callback')
    return recalibration(config.density, block=config.block)


def _check_hads(config: TrainConfig) -> None:
    from xsake.hads.profile.budgets import uniform_counts
    from xsake.hads.profile.causal_grid import CausalGrid

    grid = CausalGrid(config.length, config.block)
    grid.check_choice('attention="hads": sequences')
    uniform_counts(1, 1, config.density, grid)


def _pattern(config: TrainConfig) -> BlockMask:
    """The configuration's pattern. ValueError if the density that it asks for is out of reach."""
    shape: dict[str, Any] = dict(length=config.length, density=config.density)
    mask = fixed_pattern(config.attention, block=config.block, **shape)
    if _near(mask, config.density):
        return mask
    masks = {block: fixed_pattern(config.attention, block=block, **shape) for block in BLOCKS}
    cure = next((f"block={block}" for block, other in masks.items() if _near(other, config.density)), None)
    nearest = min((abs(float(other.density()) - config.density), block) for block, other in masks.items())[1]
    raise ValueError(
        f"attention={config.attention!r} in blocks of {config.block} tokens keeps {float(mask.density()):.0%} of the "
        f"blocks of {config.length} tokens where density={config.density} comes nearest: use "
        f"{cure or f'block={nearest} and density={float(masks[nearest].density()):.2f}, or longer sequences'}"
    )


def _near(mask: BlockMask, density: float) -> bool:
    return abs(float(mask.density()) - density) <= NEAR * density


def with_block(config: TrainConfig) -> TrainConfig:
    """The configuration with the first of BLOCKS in which its attention can have its density; as it is if none can."""
    checks = dict.fromkeys(("random", *_FAMILIES), _pattern) | {"hads": _check_hads}
    for block in BLOCKS if config.attention in checks else ():
        sized = dataclasses.replace(config, block=block)
        with contextlib.suppress(ValueError):
            checks[config.attention](sized)
            return sized
    return config


def attention_of(config: TrainConfig) -> tuple[Callable[..., Any], MaskFn | None, float]:
    """(attention_fn, mask_fn, density) of a configuration; "hads" gets its mask function from recalibration."""
    if config.attention not in ATTENTION:
        raise ValueError(f"attention={config.attention!r} must be one of {', '.join(ATTENTION)}")
    if config.attention in ("dense", "cudnn") and config.density != 1:
        raise ValueError(f"attention={config.attention!r} is dense: density={config.density} must be 1")
    if config.attention == "cudnn":
        return _cudnn, None, 1.0
    if config.attention in ("dense", "hads"):
        return xsake.attention, None, config.density
    mask = _pattern(config)
    return xsake.attention, FixedMask(mask), float(mask.density())
