"""Which race of sparse and dense attention tells whether a call of HADS is faster sparsely."""

from __future__ import annotations

import math
from collections.abc import Sequence

from xsake.tuning_db.database import Entry
from xsake.tuning_db.key import REACH, Key


def telling_race(races: Sequence[Entry], key: Key) -> int | None:
    """The number of the race that tells most of a call; None if no race tells anything.

    The call's `kv_len` need not be a power of two.

    Sparse attention gains with the size and loses with the density. So a race that it won tells of calls that are at
    least as large and at most as dense; one that it did not win, of calls that are at least as dense and less than
    twice as large. The nearest of these decides; where two are as near, the smaller one.
    """
    found: list[tuple[float, float, int]] = []
    for number, entry in enumerate(races):
        apart = _apart(entry.key, key)
        if entry.key.dtype != key.dtype or apart > REACH:
            continue
        octaves = _octaves(key) - _octaves(entry.key)
        denser = (key.place[3] or 0) - (entry.key.place[3] or 0)
        if (octaves >= 0 and denser <= 0) if entry.config["sparse"] else (octaves < 1 and denser >= 0):
            found.append((apart + abs(octaves) + abs(denser) / 2, _octaves(entry.key), number))
    return min(found)[2] if found else None


def _octaves(key: Key) -> float:
    """The size: tokens of a sequence; of new tokens, the tokens and heads of all sequences."""
    return math.log2(key.kv_len * key.heads if key.direction == "decode" else key.kv_len)


def _apart(a: Key, b: Key) -> float:
    """How many octaves the shapes of two calls are apart, but for size and density; each counts half."""
    sizes = [(a.head_dim, b.head_dim), (a.group, b.group), (a.block_q, b.block_q), (a.block_kv, b.block_kv)]
    if a.direction != "decode":
        sizes.append((a.heads, b.heads))
    if a.direction == "chunk":
        sizes.append((a.q_len, b.q_len))
    return sum(abs(math.log2(x / y)) for x, y in sizes) / 2
