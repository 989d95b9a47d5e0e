"""The square, causal grid of blocks that HADS chooses from."""

from __future__ import annotations

import dataclasses

import numpy as np

from xsake.hads.profile.rule import RULE, Rule


@dataclasses.dataclass(frozen=True)
class CausalGrid:
    """`length` tokens, queries and keys alike, cut into blocks of `block`; the last block may be short.

    `rule` says which blocks are forced, and how much each row counts.

    >>> grid = CausalGrid(1024, 64)
    >>> grid.side, grid.blocks, grid.forced_blocks
    (16, 136, 46)
    """

    length: int
    block: int
    rule: Rule = RULE

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
        """Blocks per head that causality allows; budgets are shares of these."""
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
        """bool[side, side]: every query of the block sees every key of the block, and all these tokens exist."""
        whole = (np.arange(self.side) + 1) * self.block <= self.length
        return whole[:, None] & (self.distance() >= (1 if self.block > 1 else 0))

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
        return int(self.forced().sum())

    def check_choice(self, what: str) -> None:
        """Raise ValueError if most blocks are forced, which leaves next to nothing to choose."""
        least = 2 * self.rule.dense_rows + 1
        if self.side < least:
            raise ValueError(
                f"{what} of {self.length} tokens have {self.side} blocks of {self.block}, most of them always on: use "
                f"at least {least * self.block} tokens, or smaller blocks"
            )
