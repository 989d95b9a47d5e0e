"""How a sequence lies on shards: one piece after another, or in zigzag."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import numpy as np

OrderName = Literal["contiguous", "zigzag"]
ORDERS = get_args(OrderName)


class Order(NamedTuple):
    """`contiguous` gives shard i the i-th of n pieces. `zigzag` gives it the pieces i and 2n-1-i of 2n.

    Under a causal rule late tokens attend to more than early ones: in zigzag every shard has as many of both.

    >>> Order.of(2, "zigzag").blocks(8).tolist()
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """

    shards: int
    name: str

    @classmethod
    def of(cls, shards: int, name: str) -> Order:
        if name not in ORDERS:
            raise ValueError(f"order={name!r} must be one of {', '.join(map(repr, ORDERS))}")
        if not isinstance(shards, (int, np.integer)) or isinstance(shards, bool) or shards < 1:
            raise ValueError(f"{shards=} must be an int of at least 1")
        return cls(int(shards), name)

    @property
    def pieces(self) -> int:
        return self.shards * (2 if self.name == "zigzag" else 1)

    def number(self, shard: Any, size: int, place: Any) -> Any:
        """The number in the sequence of what stands at `place` among the `size` tokens (or blocks) of a shard."""
        if self.name == "contiguous":
            return shard * size + place
        half = size // 2
        piece = shard + (place // half) * (2 * self.shards - 1 - 2 * shard)  # the shard's first piece, or its second
        return piece * half + place % half

    def blocks(self, total: int) -> np.ndarray:
        """[shards, total / shards]: the numbers of the blocks on each shard."""
        size = total // self.shards
        return self.number(np.arange(self.shards)[:, None], size, np.arange(size)[None])

    def places(self, total: int) -> np.ndarray:
        """[total]: where each block lies, all shards' blocks in a row."""
        return np.argsort(self.blocks(total).reshape(-1)).astype(np.int32)


def shard_of_rows(rows: int, shards: int, order: OrderName = "contiguous") -> np.ndarray:
    """i32[rows]: the shard that holds each row of blocks. If rows do not divide, the last pieces are short, or empty.

    >>> shard_of_rows(8, 2, "zigzag").tolist()
    [0, 0, 1, 1, 1, 1, 0, 0]
    """
    pieces = Order.of(shards, order).pieces
    piece = np.arange(rows, dtype=np.int32) // -(-rows // pieces)
    return piece if order == "contiguous" else np.minimum(piece, pieces - 1 - piece)
