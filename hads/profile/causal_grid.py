"""The square, causal grid of blocks that HADS chooses from."""

from __future__ import annotations

import dataclasses

import numpy as np

DENSE_ROWS = 4
# What follows a sequence is made from its end: an error in its last rows of blocks counts so much.
LAST_ROWS, LAST_WEIGHT = 2, 4.0


@dataclasses.dataclass(frozen=True)
class CausalGrid:
    """`length` tokens in blocks of `block`, queries and keys alike; the last block may be short.

    >>> grid = CausalGrid(1024, 64)
    >>> grid.side, grid.blocks, grid.forced_blocks
    (16, 136, 46)
    """

    length: int
    block: int

    def __post_init__(self) -> None:
        for name in ("length", "block"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be an int of at least 1")

    @property
    def side(self) -> int:
        """Blocks along one side."""
        return -(-self.length // self.block)

    @property
    def blocks(self) -> int:
        """Blocks of one head that causality allows: what a budget is a share of."""
        return self.side * (self.side + 1) // 2

    @property
    def sizes(self) -> np.ndarray:
        """i32[side]: tokens of each block."""
        return np.minimum(self.block, self.length - self.block * np.arange(self.side)).astype(np.int32)

    def distance(self) -> np.ndarray:
        """i32[side, side]: how many blocks back the key block lies; negative where causality forbids it."""
        i = np.arange(self.side, dtype=np.int32)
        return i[:, None] - i

    def causal(self) -> np.ndarray:
        return self.distance() >= 0

    def full(self) -> np.ndarray:
        """bool[side, side]: every query of the block sees every key of it, and none is past the last token."""
        whole = (np.arange(self.side) + 1) * self.block <= self.length
        return whole[:, None] & (self.distance() >= (1 if self.block > 1 else 0))

    def forced(self) -> np.ndarray:
        """bool[side, side]: the blocks that are always on: the first (the attention sink), the diagonal, the one before
        it (a block's first tokens have all their near context there), and everything in the first rows."""
        i = np.arange(self.side)
        distance = self.distance()
        return self.causal() & ((i == 0) | (distance <= 1) | (i[:, None] < DENSE_ROWS))

    def row_weights(self) -> np.ndarray:
        """f32[side]: what an error in each row counts."""
        return np.where(np.arange(self.side) < self.side - LAST_ROWS, 1.0, LAST_WEIGHT).astype(np.float32)

    @property
    def forced_blocks(self) -> int:
        return int(self.forced().sum())
