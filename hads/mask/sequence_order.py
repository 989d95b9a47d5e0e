"""Which rows of blocks each shard of a sequence holds.

    contiguous   shard s of n holds the s-th of n equal parts
    zigzag       the sequence is cut in 2 n parts, and shard s holds parts s and 2 n - 1 - s

Parts are whole rows of blocks, as many in each; if the rows do not divide, the last parts are shorter, or empty. Under
a causal rule a late row sees more than an early row: in zigzag every shard has as many late rows as early ones.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

Order = Literal["contiguous", "zigzag"]


def shard_of_rows(rows: int, shards: int, order: Order = "contiguous") -> np.ndarray:
    """i32[rows]: the shard that holds each row of blocks.

    >>> shard_of_rows(8, 2, "contiguous").tolist()
    [0, 0, 0, 0, 1, 1, 1, 1]
    >>> shard_of_rows(8, 2, "zigzag").tolist()
    [0, 0, 1, 1, 1, 1, 0, 0]
    """
    check_shards(shards, order)
    parts = shards if order == "contiguous" else 2 * shards
    part = np.arange(rows, dtype=np.int32) // -(-rows // parts)
    return part if order == "contiguous" else np.minimum(part, parts - 1 - part)


def check_shards(shards: int, order: str) -> None:
    if not isinstance(shards, int | np.integer) or isinstance(shards, bool) or shards < 1:
        raise ValueError(f"{shards=} must be an int of at least 1")
    if order not in get_args(Order):
        raise ValueError(f"{order=} must be one of {', '.join(map(repr, get_args(Order)))}")
