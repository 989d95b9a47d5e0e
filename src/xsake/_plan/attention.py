"""Attention on one device: operations, and seconds by recorded throughputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from xsake._plan.devices import Device
from xsake._plan.groups import GIGA
from xsake._plan.rates import BOTH, BOTH_FLOPS, FORWARD, Point, Rate, attention_rate

TILE = 128  # queries that one core computes at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionTime:
    """Seconds of one layer: forward, backward, and sums of partial results between the calls of a ring."""

    forward: float
    backward: float
    forward_sums: float = 0.0
    backward_sums: float = 0.0
    rates: tuple[Rate, Rate]


def blocks_per_row(tokens: int, block: int, density: float) -> float:
    """Active blocks per row of query blocks: `density` of the causal rule's blocks.

    >>> blocks_per_row(32768, 128, 0.5)
    64.25
    """
    return density * (tokens / block + 1) / 2


def forward_flops(*, tokens: int, block: int, density: float, q_heads: int, head_dim: int) -> float:
    """Operations of one sequence in one layer: on active blocks, with a block on the causal diagonal as half.

    >>> forward_flops(tokens=256, block=128, density=1.0, q_heads=1, head_dim=64) == 4 * 64 * 256 * 256 / 2
    True
    """
    rows = tokens / block
    area = block * block * rows * (blocks_per_row(tokens, block, density) - 0.5)
    return 4 * q_heads * head_dim * area


def attention_time(
    points: Sequence[Point],
    device: Device,
    *,
    flops: float,
    rows: int,
    q_heads: int,
    kv_heads: int,
    q_heads_per_call: int,
    head_dim: int,
    block: int,
    keys: int,
    blocks_per_row: float,
    hops: int = 1,
) -> AttentionTime:
    """`flops` of a forward on one device, for `rows` queries, in calls with `keys` keys and `q_heads_per_call` heads.

    A device with fewer tiles of TILE queries than cores is slower in that proportion. In a ring, each of the hops but
    the first adds its output to a float32 sum, and in the backward dQ, dK and dV: 10 bytes per number (read and write
    four, read two).
    """
    full = min(1.0, max(1.0, rows / TILE) * q_heads_per_call / device.cores)
    at = dict(device=device.recorded_as, keys=keys, head_dim=head_dim, block=block, blocks_per_row=blocks_per_row)
    forward, both = (attention_rate(points, direction=direction, **at) for direction in (FORWARD, BOTH))  # type: ignore[arg-type]
    seconds = flops / (forward.tflops * 1e12 * full)
    both_seconds = BOTH_FLOPS * flops / (both.tflops * 1e12 * full)
    per_sum = 10 * rows * head_dim / (device.bandwidth * GIGA) * (hops - 1)
    return AttentionTime(
        forward=seconds,
        backward=both_seconds - seconds,
        forward_sums=per_sum * q_heads,
        backward_sums=per_sum * (q_heads + 2 * kv_heads),
        rates=(forward, both),
    )
