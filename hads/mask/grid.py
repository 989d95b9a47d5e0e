"""The blocks of a mask: how many there are, and what its index rule makes of each."""

from __future__ import annotations

import dataclasses
import reprlib
from functools import lru_cache
from typing import Any

import numpy as np

from xsake._ground.kinds import LARGEST_INT
from xsake._ground.trace import known_flag
from xsake.hads.mask.band import NO_LIMIT, Band, parse_window

Window = int | tuple[int | None, int | None] | None


@dataclasses.dataclass(frozen=True)
class Grid:
    block_q: int
    block_kv: int
    q_len: int
    kv_len: int
    is_causal: bool
    local_window_size: tuple[int | None, int | None] | None

    @classmethod
    def of(cls, block_q: int, block_kv: int, q_len: int, kv_len: int, is_causal: bool, window: Window) -> Grid:
        for name, value in (("block_q", block_q), ("block_kv", block_kv), ("q_len", q_len), ("kv_len", kv_len)):
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if not 1 <= value <= NO_LIMIT:
                raise ValueError(f"{name}={reprlib.repr(value)} must be at least 1 and at most {NO_LIMIT}")
        pair = parse_window(window)
        return cls(
            int(block_q),
            int(block_kv),
            int(q_len),
            int(kv_len),
            known_flag("is_causal", is_causal),
            None if pair == (None, None) else pair,
        )

    def with_band(self, band: Band) -> Grid:
        """The same blocks with another rule."""
        right = None if band.right == 0 else band.right
        pair = None if band.left is None and right is None else (band.left, right)
        return dataclasses.replace(self, is_causal=band.right == 0, local_window_size=pair)

    @property
    def band(self) -> Band:
        return Band.of(self.is_causal, self.local_window_size)

    @property
    def num_q(self) -> int:
        return -(-self.q_len // self.block_q)

    @property
    def num_kv(self) -> int:
        return -(-self.kv_len // self.block_kv)

    def check_blocks(self) -> None:
        """Raise ValueError if int32 cannot number the blocks."""
        if self.num_q * self.num_kv > LARGEST_INT:
            raise ValueError(f"{self.num_q} x {self.num_kv} blocks are more than {LARGEST_INT}: use larger blocks")

    @property
    def num_allowed(self) -> int:
        return _count_allowed(self)

    def most_in_rows(self, rows: np.ndarray) -> int:
        """The most blocks that the rule allows to one of the sets of rows, int[sets, rows]; nQ stands for no row."""
        per_row = np.append(self.allowed_and_full()[0].sum(-1), 0)
        return int(per_row[rows].sum(-1).max())

    def allowed_and_full(self) -> tuple[np.ndarray, np.ndarray]:
        """bool[nQ, nK] each: some element passes the rule; every element does and none is tail padding."""
        rows, columns = np.arange(self.num_q)[:, None], np.arange(self.num_kv)[None, :]
        shape = (self.num_q, self.num_kv)
        allowed = np.broadcast_to(self.is_allowed(np, rows, columns), shape)
        return allowed, np.broadcast_to(self.is_full(rows, columns), shape)

    def is_allowed(self, xp: Any, row: Any, column: Any) -> Any:
        """Whether some element of a block passes the rule; block numbers may be traced."""
        q_first, k_first = row * self.block_q, column * self.block_kv
        q_last = xp.minimum(q_first + self.block_q, self.q_len) - 1
        k_last = xp.minimum(k_first + self.block_kv, self.kv_len) - 1
        return self.band.touches(k_first - q_last, k_last - q_first)

    def is_full(self, row: Any, column: Any) -> Any:
        """Whether every element of a block passes the rule and none is tail padding; block numbers may be traced."""
        q_first, k_first = row * self.block_q, column * self.block_kv
        q_end, k_end = q_first + self.block_q, k_first + self.block_kv
        whole = (q_end <= self.q_len) & (k_end <= self.kv_len)
        return whole & self.band.allows(k_first - (q_end - 1)) & self.band.allows((k_end - 1) - q_first)


@lru_cache(maxsize=256)
def _count_allowed(grid: Grid) -> int:
    return int(grid.allowed_and_full()[0].sum())
