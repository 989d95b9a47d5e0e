"""The exchanges of K and V over the sequence axis: what travels, and how much of it hides behind attention.

In all of them queries stay where they are. `kv` is the size in bytes of one layer's K and V in bfloat16: of the whole
sequence, and of the KV heads that a device has. n is the size of the sequence axis.

- none: the sequence is on one device.
- gather: K and V are all-gathered a few KV heads at a time, again in the backward; dK and dV are reduce-scattered.
- ring: K and V travel n - 1 hops, again in the backward; there dK and dV travel too, in float32, n hops.
- sparse: like gather, but only the blocks that a device's rows list travel, as one all-to-all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from xsake._plan.devices import Links
from xsake._plan.groups import Group, collective_seconds, exchange_seconds, hop_seconds, share_of_others

EXCHANGES = ("none", "gather", "ring", "sparse")
WHAT_IF = "sparse"  # never the best: whether it pays depends on the masks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a device receives, and the seconds that takes; `hidden` of them beside other work."""

    bytes: float = 0.0
    seconds: float = 0.0
    hidden: float = 0.0

    @property
    def exposed(self) -> float:
        return self.seconds - self.hidden

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            bytes=self.bytes + other.bytes, seconds=self.seconds + other.seconds, hidden=self.hidden + other.hidden
        )

    def __mul__(self, times: int) -> Traffic:
        return Traffic(bytes=self.bytes * times, seconds=self.seconds * times, hidden=self.hidden * times)


def kv_bytes(tokens: int, kv_heads: int, head_dim: int) -> float:
    """K and V of one layer, in bfloat16.

    >>> kv_bytes(1024, 8, 128)
    4194304.0
    """
    return 2.0 * tokens * kv_heads * head_dim * 2


def heads_per_piece(kv_heads: int, n: int) -> int:
    """How many KV heads `gather` brings at a time: a piece of the whole sequence is about as large as the local shard.

    >>> heads_per_piece(32, 8), heads_per_piece(8, 64)
    (4, 1)
    """
    return max(1, kv_heads // n)


def pieces(kv_heads: int, n: int) -> int:
    return -(-kv_heads // heads_per_piece(kv_heads, n))


def forward_bytes(exchange: str, kv: float, n: int, union: float = 1.0) -> float:
    """Bytes that a device receives in one layer's forward."""
    if exchange == "none":
        return 0.0
    return share_of_others(n) * kv * (union if exchange == "sparse" else 1.0)


def backward_bytes(exchange: str, kv: float, n: int, union: float = 1.0) -> float:
    """Bytes that a device receives in one layer's backward: K and V again, and dK and dV."""
    again = forward_bytes(exchange, kv, n, union)
    gradients = 2 * kv if exchange == "ring" else again
    return again + gradients


def exchange_traffic(
    exchange: str,
    *,
    backward: bool,
    kv: float,
    kv_heads: int,
    group: Group,
    links: Links,
    attention: float,
    overlap: float,
    union: float,
) -> Traffic:
    """One layer's exchange in one direction, beside `attention` seconds of attention.

    The first piece of `gather` and of `sparse` is waited for, and the last gradients; the others may travel while
    another piece is computed. In `ring` every hop may travel while a hop is computed, but for the last of dK and dV.
    `overlap` is the share of what could hide that does.
    """
    n = group.size
    if exchange == "none":
        return Traffic()
    received = backward_bytes(exchange, kv, n, union) if backward else forward_bytes(exchange, kv, n, union)
    if exchange == "ring":
        kv_hop = hop_seconds(kv / n, group, links)
        d_kv_hop = hop_seconds(2 * kv / n, group, links) if backward else 0.0
        seconds = (n - 1) * kv_hop + n * d_kv_hop
        hidden = (n - 1) * min(kv_hop + d_kv_hop, attention / n)
    else:
        move: Callable[..., float] = exchange_seconds if exchange == "sparse" else collective_seconds
        count, ways = pieces(kv_heads, n), 2 if backward else 1
        piece = ways * move(received / ways / count, group, links)
        seconds, hidden = count * piece, (count - 1) * min(piece, attention / count)
    return Traffic(bytes=received, seconds=seconds, hidden=overlap * hidden)
