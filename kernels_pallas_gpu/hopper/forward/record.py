"""The forward kernel as the backend knows it: the calls that it serves, and its configurations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax import Array

from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu.hopper.forward import config as space_of
from xsake.kernels_pallas_gpu.hopper.forward import launch
from xsake.kernels_pallas_gpu.hopper.forward.config import ForwardConfig, Pairing
from xsake.kernels_pallas_gpu.hopper.kernel import DTYPES, Kernel, interpretation
from xsake.kernels_pallas_gpu.hopper.tile.bits import fits_in_lists
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing


def knows(call: Call) -> str | None:
    mask = call.mask
    if call.query.dtype.name not in DTYPES:
        return f"query.dtype={call.query.dtype} must be one of {DTYPES}"
    if call.page is not None and call.page % 64:
        return f"page_table: the pages of {call.page} keys must be a multiple of 64"
    if mask.block_kv < 64:
        if problem := _unknown_short_blocks(call):
            return problem
    elif mask.block_kv % 64:
        return f"mask.block_kv={mask.block_kv} must be a multiple of 64, or 16, 32 or 48"
    packing = Packing.of(mask.block_q, mask.heads, call.q_heads, call.kv_heads)
    if packing is None:
        return (
            f"mask.block_q={mask.block_q} must be a multiple of 64, or a power of two (at least 8 unless 16, 32 or 64 "
            f"query heads share a K/V head) that the query heads of a K/V head fill up to a multiple of 64 rows, where "
            f"these share the mask: here are {call.q_heads} query heads, {call.kv_heads} K/V heads and masks for "
            f"{mask.heads}"
        )
    if packing.group > 1 and call.bias is not None:
        return f"mask.block_q={mask.block_q} must be a multiple of 64 where there is a bias"
    return None


def _unknown_short_blocks(call: Call) -> str | None:
    """Blocks of fewer than 64 keys are gathered into tiles."""
    needs_64 = f"mask.block_kv={call.mask.block_kv} must be a multiple of 64"
    if call.mask.block_kv % 16:
        return f"{needs_64}, or 16, 32 or 48"
    if call.mask.block_q % 64:
        return f"{needs_64} where mask.block_q={call.mask.block_q} is not"
    for name in ("bias", "q_segments", "kv_segments", "q_positions", "kv_positions", "page_table"):
        if getattr(call, name) is not None:
            return f"{needs_64} where there is {name}"
    return f"{needs_64} where there are bitmaps" if call.mask.bitmaps is not None else None


def default(call: Call) -> ForwardConfig:
    config = space_of.heuristic(call.head_dim, call.value_dim, pairing(call), _vectors(call), _widest_tile(call))
    if Packing.of_call(call).group > 1 and call.mask.bitmaps is not None:
        # A warpgroup that skips a tile would have to wait for its turn.
        config = dataclasses.replace(config, take_turns=False)
    return config


def space(call: Call) -> Sequence[ForwardConfig]:
    return space_of.search_space(call.head_dim, call.value_dim, pairing(call), _vectors(call), _widest_tile(call))


def misfit(call: Call, config: ForwardConfig) -> str | None:
    if config.fits(call.head_dim, call.value_dim, pairing(call), _vectors(call)):
        return None
    return "it needs more shared memory or registers than a Hopper GPU has"


def run(call: Call, *, config: ForwardConfig) -> tuple[Array, Array]:
    """(out, lse)"""
    return launch.forward(call, pairing=pairing(call), config=config, interpret=interpretation())


def pairing(call: Call) -> Pairing:
    packing = Packing.of_call(call)
    tests = (call.q_positions, call.kv_positions, call.kv_segments, call.bias, call.mask.bitmaps, call.page_table)
    plain = all(x is None for x in tests) and call.full_is_exact
    mergeable = space_of.mergeable(call.mask.block_q, call.mask.block_kv, call.q_len, call.band, plain=plain)
    widest, heads = max(call.head_dim, call.value_dim), call.q_heads // packing.group
    return Pairing.of(packing.rows, call.mask.heads, heads, call.kv_heads, widest, mergeable=mergeable)


def _vectors(call: Call) -> int:
    """How many arrays with a number per key a tile has beside K and V."""
    return (call.kv_segments is not None) + (call.q_positions is not None or call.kv_positions is not None)


def _widest_tile(call: Call) -> int:
    """Keys of a step at most: only plain rules and bits of rows have tiles of several blocks, see `ForwardPlan`."""
    bitmaps = call.mask.bitmaps
    plain = not _vectors(call) and call.bias is None and (bitmaps is None or fits_in_lists(bitmaps.shape))
    return 128 if plain else math.gcd(128, call.mask.block_kv)


KERNEL = Kernel(name="forward", knows=knows, default=default, space=space, misfit=misfit, run=run)
