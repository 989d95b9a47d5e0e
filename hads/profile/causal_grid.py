"""The square, causal grid of blocks that HADS chooses from, or the band of it that a window leaves."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import numpy as np

from xsake.hads.profile.rule import RULE, Rule


@dataclasses.dataclass(frozen=True)
class CausalGrid:
    """`length` tokens, queries and keys alike, cut into blocks of `block`; the last block may be short.

    `rule` says which blocks are forced, and how much each row counts. With a `window`, a token sees itself and the
    `window - 1` tokens before it: blocks of which no query of their row sees a key are not there, and do not count.

    >>> grid = CausalGrid(1024, 64)
    >>> grid.side, grid.blocks, grid.forced_blocks
    (16, 136, 46)
    >>> CausalGrid(1024, 64, window=256).blocks
    70
    """

    length: int
    block: int
    rule: Rule = RULE
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise ValueError(f"window={self.window!r} must be None or an int of at least 1")
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
        """Blocks per head that causality and the window allow; budgets are shares of these."""
        outside = self.side - 1 - self.reach
        return (self.side * (self.side + 1) - outside * (outside + 1)) // 2

    @property
    def reach(self) -> int:
        """How many blocks back a row's farthest block lies."""
        farthest = self.side - 1
        return farthest if self.window is None else min(farthest, blocks_back(self.window, self.block))

    @property
    def sizes(self) -> np.ndarray:
        """i32[side]: tokens of each block."""
        return np.minimum(self.block, self.length - self.block * np.arange(self.side)).astype(np.int32)

    def distance(self) -> np.ndarray:
        """i32[side, side]: how many blocks back the key block lies; negative where causality forbids it."""
        i = np.arange(self.side, dtype=np.int32)
        return i[:, None] - i

    def causal(self) -> np.ndarray:
        """bool[side, side]: some query of the block sees some key of the block."""
        back = self.distance()
        return (back >= 0) & (back <= self.reach)

    def full(self) -> np.ndarray:
        """bool[side, side]: every query of the block sees every key of the block, and all these tokens exist."""
        whole = (np.arange(self.side) + 1) * self.block <= self.length
        seen = self.distance() >= (1 if self.block > 1 else 0)
        if self.window is not None:
            seen &= (self.distance() + 1) * self.block <= self.window
        return whole[:, None] & seen

    def forced(self) -> np.ndarray:
        """bool[side, side]: the forced blocks, which are always on (`Rule.forces`)."""
        i = np.arange(self.side)
        return self.causal() & self.rule.forces(i[:, None], i)

    def row_weights(self) -> np.ndarray:
        """f32[side]: how much an error in each row counts (`Rule.row_weight`)."""
        return self.rule.row_weight(np.arange(self.side), self.side).astype(np.float32)

    def last_rows(self) -> np.ndarray:
        """bool[side]: the last rows, in which an error counts more."""
        return np.arange(self.side) >= self.side - self.rule.last_rows

    @property
    def forced_blocks(self) -> int:
        return int(self.rows()[0].sum())

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """How many blocks of each row are forced, and how many others are allowed, i64[side] each."""
        return _rows(self)

    def check_choice(self, what: str) -> None:
        """Raise ValueError if most blocks are forced, which leaves next to nothing to choose."""
        least = 2 * self.rule.dense_rows + 1
        if self.side < least:
            raise ValueError(
                f"{what} of {self.length} tokens have {self.side} blocks of {self.block}, most of them always on: use "
                f"at least {least * self.block} tokens, or smaller blocks"
            )


@lru_cache(maxsize=64)  # a prompt's budget asks for these counts again and again
def _rows(grid: CausalGrid) -> tuple[np.ndarray, np.ndarray]:
    forced = np.count_nonzero(grid.forced(), -1)
    free = np.count_nonzero(grid.causal(), -1) - forced
    forced.flags.writeable = free.flags.writeable = False
    return forced, free


def blocks_back(window: int, block: int) -> int:
    """How many blocks before its own a block's first token sees, at least in part.

    >>> blocks_back(256, 64), blocks_back(257, 64), blocks_back(258, 64), blocks_back(1, 64)
    (4, 4, 5, 0)
    """
    return -(-(window - 1) // block)
