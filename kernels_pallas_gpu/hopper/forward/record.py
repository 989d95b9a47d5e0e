"""The forward kernel as the backend knows it: the calls that it serves, and its configurations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax import Array

from xsake.backend.contract import Call
from xsake.kernels_pallas_gpu import limits
from xsake.kernels_pallas_gpu.hopper.forward import launch
from xsake.kernels_pallas_gpu.hopper.forward.config import ForwardConfig, Pairing, mergeable
from xsake.kernels_pallas_gpu.hopper.forward.plan import ForwardPlan
from xsake.kernels_pallas_gpu.hopper.kernel import DTYPES, Kernel, interpretation, short_blocks
from xsake.kernels_pallas_gpu.hopper.tile.bits import fits_in_lists
from xsake.kernels_pallas_gpu.hopper.tile.packing import Packing
from xsake.kernels_pallas_gpu.limits import hopper_sms


def knows(call: Call) -> str | None:
    mask = call.mask
    if call.query.dtype.name not in DTYPES:
        return f"query.dtype={call.query.dtype} must be one of {DTYPES}"
    if call.page is not None and call.page % 64:
        return f"page_table: the pages of {call.page} keys must be a multiple of 64"
    if short_blocks(call):
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
    """The first configuration that fits: prefer a wide tile, then queries loaded ahead, then a deep ring.

    A call whose tiles are narrower than a configuration says would leave half of the ring unused.
    """
    wide = call.value_dim > 128
    # A warpgroup that skips a tile by its bits would have to wait for its turn.
    skips = Packing.of_call(call).group > 1 and call.mask.bitmaps is not None
    # Beside an accumulator of 64 x 256 there are no registers for the state of a persistent loop.
    shared = dict(num_ctas=0 if wide else hopper_sms(), take_turns=not skips)
    for tile_kv in (128, 64) if _widest_tile(call) >= 128 else (64,):
        for q_stages in (1,) if wide else (2, 1):
            for stages in (4, 3, 2):
                config = ForwardConfig(tile_kv=tile_kv, stages=stages, q_stages=q_stages, **shared)
                if misfit(call, config) is None:
                    return config
    raise NotImplementedError(
        f"head_dim={call.head_dim} and value_dim={call.value_dim} need more shared memory or registers than Hopper "
        "has, in every configuration"
    )


def space(call: Call) -> Sequence[ForwardConfig]:
    first = default(call)
    configs = [dataclasses.replace(first, head_group=n) for n in (1, 2, 4, 8, 16, 64)]
    if pairing(call) in (Pairing.ROWS, Pairing.UNION, Pairing.HEADS):
        configs.insert(0, dataclasses.replace(first, take_turns=not first.take_turns))
    configs += [
        ForwardConfig(tile_kv=tile_kv, stages=stages, q_stages=q_stages, num_ctas=num_ctas)
        for tile_kv in (128, 64)
        for stages in (4, 3, 2)
        for q_stages in (2, 1)
        for num_ctas in (hopper_sms(), 0)
    ]
    return list(dict.fromkeys([first, *(config for config in configs if misfit(call, config) is None)]))


def misfit(call: Call, config: ForwardConfig) -> str | None:
    # An accumulator of 64 x 256 leaves no registers for logits of 64 x 128.
    if call.value_dim > 128 and config.tile_kv > 64:
        return "it needs more registers than a Hopper GPU has"
    return limits.misfit(ForwardPlan.of(call, Packing.of_call(call), config, pairing=pairing(call)).smem_bytes())


def run(call: Call, *, config: ForwardConfig) -> tuple[Array, Array]:
    """(out, lse)"""
    return launch.forward(call, pairing=pairing(call), config=config, interpret=interpretation())


def pairing(call: Call) -> Pairing:
    packing = Packing.of_call(call)
    tests = (call.q_positions, call.kv_positions, call.kv_segments, call.bias, call.mask.bitmaps, call.page_table)
    plain = all(x is None for x in tests) and call.full_is_exact
    merged = mergeable(call.mask.block_q, call.mask.block_kv, call.q_len, call.band, plain=plain)
    widest, heads = max(call.head_dim, call.value_dim), call.q_heads // packing.group
    return Pairing.of(packing.rows, call.mask.heads, heads, call.kv_heads, widest, mergeable=merged)


def _widest_tile(call: Call) -> int:
    """Keys of a step at most: only plain rules and bits of rows have tiles of several blocks, see `ForwardPlan`."""
    bitmaps, given = call.mask.bitmaps, (call.kv_segments, call.q_positions, call.kv_positions)
    plain = all(x is None for x in given) and call.bias is None and (bitmaps is None or fits_in_lists(bitmaps.shape))
    return 128 if plain else math.gcd(128, call.mask.block_kv)


KERNEL = Kernel(name="forward", knows=knows, default=default, space=space, misfit=misfit, run=run)
