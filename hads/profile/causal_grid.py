"""The causal grid of blocks that HADS chooses from, or the band of it that a window leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xsake.hads.profile.rule import RULE, Rule


@dataclasses.dataclass(frozen=True)
class CausalGrid:
    """`length` tokens: queries cut into rows of `block_q`, keys into blocks of `block`; the last ones may be short.

    Rows are as high as blocks are wide unless `block_q` says otherwise: a multiple of `block`, which is then `tall`
    blocks. `rule` says which blocks are forced, and how much each row counts. With a `window`, a token sees itself and
    the `window - 1` tokens before it: blocks of which no query of their row sees a key are not there, and do not count.

    >>> grid = CausalGrid(1024, 64)
    >>> grid.rows, grid.columns, grid.blocks, grid.forced_blocks
    (16, 16, 136, 46)
    >>> CausalGrid(1024, 64, window=256).blocks
    70
    >>> tall = CausalGrid.of(1024, 32, block_q=128)
    >>> tall.rows, tall.columns, tall.blocks, tall.forced_blocks
    (8, 32, 144, 54)
    """

    length: int
    block: int
    rule: Rule = RULE
    window: int | None = None
    block_q: int = 0

    def __post_init__(self) -> None:
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise ValueError(f"window={self.window!r} must be None or an int of at least 1")
        object.__setattr__(self, "block_q", self.block_q or self.block)
        for name in ("length", "block", "block_q"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be an int of at least 1")
        if self.block_q % self.block:
            raise ValueError(f"block_q={self.block_q} must be a multiple of block={self.block}")

    @classmethod
    def of(cls, length: int, block: int, block_q: int | None = None, window: int | None = None) -> CausalGrid:
        """The grid of new profiles: by the rule for such blocks."""
        grid = cls(length, block, window=window, block_q=block_q or block)
        return dataclasses.replace(grid, rule=Rule.of_blocks(grid.tall))

    @property
    def rows(self) -> int:
        """Rows of blocks."""
        return -(-self.length // self.block_q)

    @property
    def columns(self) -> int:
        """Blocks of keys."""
        return -(-self.length // self.block)

    @property
    def tall(self) -> int:
        """How many blocks of keys a row is high."""
        return self.block_q // self.block

    @property
    def sizes(self) -> np.ndarray:
        """i32[columns]: tokens of each block."""
        return np.minimum(self.block, self.length - self.block * np.arange(self.columns)).astype(np.int32)

    @property
    def shape(self) -> dict[str, int]:
        """The sizes of its blocks as arguments: without `block_q` if rows are as high as blocks are wide."""
        return {"block": self.block} | ({"block_q": self.block_q} if self.tall > 1 else {})

    @property
    def blocks(self) -> int:
        """Blocks per head that causality and the window allow; budgets are shares of these."""
        end = (np.arange(self.rows) + 1) * self.tall
        return int((np.minimum(end, self.columns) - np.maximum(end - 1 - self.reach, 0)).sum())

    @property
    def reach(self) -> int:
        """How many blocks back a row's farthest block lies."""
        farthest = self.rows * self.tall - 1
        return farthest if self.window is None else min(farthest, self.tall - 1 + blocks_back(self.window, self.block))

    def distance(self) -> np.ndarray:
        """i32[rows, columns]: how many blocks back the key block lies from the row's last one; negative where causality
        forbids it."""
        row, column = np.arange(self.rows, dtype=np.int32), np.arange(self.columns, dtype=np.int32)
        return (row[:, None] + 1) * self.tall - 1 - column

    def causal(self) -> np.ndarray:
        """bool[rows, columns]: some query of the row sees some key of the block."""
        back = self.distance()
        return (back >= 0) & (back <= self.reach)

    def full(self) -> np.ndarray:
        """bool[rows, columns]: every query of the row sees every key of the block, and all these tokens exist."""
        whole = (np.arange(self.rows) + 1) * self.block_q <= self.length
        seen = self.distance() >= self.tall - (1 if self.block == 1 else 0)
        if self.window is not None:
            seen &= (self.distance() + 1) * self.block <= self.window
        return whole[:, None] & seen

    def forced(self) -> np.ndarray:
        """bool[rows, columns]: the forced blocks, which are always on (`Rule.forces`)."""
        return self.causal() & self.rule.forces(np.arange(self.rows)[:, None], np.arange(self.columns), self.tall)

    def row_weights(self, answers: Sequence[int] = ()) -> np.ndarray:
        """f32[rows]: how much an error in each row counts."""
        return np.where(self.last_rows(answers), self.rule.last_weight, 1.0).astype(np.float32)

    def last_rows(self, answers: Sequence[int] = ()) -> np.ndarray:
        """bool[rows]: the last rows, in which an error counts more, and those before the tokens where answers begin."""
        row, last = np.arange(self.rows), np.zeros(self.rows, bool)
        for end in (self.length, *answers):
            last |= (row < self.rows_of(end)) & (row >= self.first_last(end))
        return last

    # These three take an int or a traced array, in XLA's programs and in kernels.

    def rows_of(self, end: Any) -> Any:
        """How many rows the tokens before `end` have."""
        return _div(end + (self.block_q - 1), self.block_q)

    def first_exact(self, end: Any) -> Any:
        """The first row that holds one of the last `Rule.exact_queries` before `end`."""
        back = end - self.rule.exact_queries
        return _div(_larger(back, 0), self.block_q)

    def first_last(self, end: Any) -> Any:
        """The first of the last rows before `end`, in which an error counts more (`Rule.last_weight`)."""
        first = self.rows_of(end) - self.rule.last_rows
        if not self.rule.exact_queries:
            return first
        return -_larger(-first, -self.first_exact(end))

    @property
    def forced_blocks(self) -> int:
        return int(self.row_counts()[0].sum())

    def row_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """How many blocks of each row are forced, and how many others are allowed, i64[rows] each."""
        return _row_counts(self)

    @property
    def least_rows(self) -> int:
        """In a grid of fewer rows most blocks are forced, which leaves next to nothing to choose."""
        return 2 * self.rule.dense_rows + 1

    def check_choice(self, what: str) -> None:
        """Raise ValueError if the grid has fewer than `least_rows`."""
        if self.rows < self.least_rows:
            raise ValueError(
                f"{what} of {self.length} tokens have {self.rows} blocks of {self.block_q}, most of them always on: "
                f"use at least {self.least_rows * self.block_q} tokens, or smaller blocks"
            )


def _div(a: Any, b: int) -> Any:
    return lax.div(a, jnp.int32(b)) if isinstance(a, jax.Array) else a // b


def _larger(a: Any, b: Any) -> Any:
    return jnp.maximum(a, b) if isinstance(a, jax.Array) else max(a, b)


@lru_cache(maxsize=64)  # a prompt's budget asks for these counts again and again
def _row_counts(grid: CausalGrid) -> tuple[np.ndarray, np.ndarray]:
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
