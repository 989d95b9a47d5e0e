"""Lines: a mask of single keys (columns) and of single diagonals, with the attention under it.

A query t sees the key s if s <= t and column s is kept, or diagonal t - s is kept, or (t, s) lies in a forced block.
Pairs of query and key are counted exactly, without ever being listed: a column and a diagonal share at most one pair.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from xsake.hads.calibration.block_statistics import scan_rows
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.exact import attention_rows

MOST_TOKENS = 46340  # beyond, the pairs of columns and diagonals together overflow 32 bits


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("columns", "diagonals", "with_forced", "pairs"),
    meta_fields=("grid",),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Lines:
    """The kept lines of every head. The first axis has one entry for all rows of blocks, or two: one for the rows
    before the grid's last rows, and one for the last rows. `pairs` are the kept pairs, those of forced blocks too."""

    columns: Any  # bool[P, B, H, T]: arrays, or shapes where a program is compiled ahead
    diagonals: Any  # bool[P, B, H, T]
    with_forced: Any  # bool
    pairs: Any  # i32[B, H]
    grid: CausalGrid

    def of_heads(self, first: int, count: int) -> Lines:
        some = slice(first, first + count)
        columns, diagonals = self.columns[:, :, some], self.diagonals[:, :, some]
        return dataclasses.replace(self, columns=columns, diagonals=diagonals, pairs=self.pairs[:, some])

    def counts(self) -> Float[Array, "B H"]:
        return self.pairs.astype(jnp.float32) * (self.grid.blocks / pairs_of(self.grid))

    def attend(
        self, query: Float[Array, "B T H D"], key: Float[Array, "B T K D"], value: Float[Array, "B T K D"]
    ) -> Float[Array, "B T H D"]:
        """Attention, a few rows of blocks at a time; there is never an array of all queries and keys."""
        highest, wide = jax.lax.Precision.HIGHEST, jnp.float32

        def row(keys: int, i: Array, q: Float[Array, "B K G block D"]) -> Array:
            logits = jnp.einsum("bkgtd,bskd->bkgts", q, key[:, :keys], precision=highest, preferred_element_type=wide)
            logits = jnp.where(self.seen(i, keys, key.shape[2]), logits * q.shape[-1] ** -0.5, -1e30)
            weights = jnp.exp(logits - logits.max(-1, keepdims=True))
            # Rounded as kernels round them: to 16 bits where the values have 16 bits.
            narrow = weights.astype(value.dtype)
            out = jnp.einsum(
                "bkgts,bskd->bkgtd", narrow, value[:, :keys], precision=highest, preferred_element_type=wide
            )
            return (out / weights.sum(-1, keepdims=True)).astype(query.dtype)

        rows = scan_rows(row, query, key.shape[2], self.grid)  # [n, B, K, G, block, D]
        b, t, h, d = query.shape
        return rows.transpose(1, 0, 4, 2, 3, 5).reshape(b, -1, h, d)[:, :t]

    def seen(self, i: Array, keys: int, kv_heads: int) -> Bool[Array, "B K G block keys"]:
        """The pairs that the queries of row i of blocks keep among the first keys."""
        grid = self.grid
        part = jnp.where(i >= first_of_last(grid) // grid.block, len(self.columns) - 1, 0)
        columns, diagonals = self.columns[part], self.diagonals[part]  # [B, H, T]
        t = i * grid.block + jnp.arange(grid.block)
        back = t[:, None] - jnp.arange(keys)[None]
        forced = grid.rule.forces(i, jnp.arange(keys) // grid.block) & self.with_forced
        kept = diagonals[..., jnp.clip(back, 0, grid.length - 1)] | (columns[..., None, :keys] | forced)
        return (kept & (back >= 0)).reshape(columns.shape[0], kv_heads, -1, grid.block, keys)


def keep_lines(
    columns: Int[Array, "B H T"],
    diagonals: Int[Array, "B H T"],
    vertical: Float[Array, "H"],
    budgets: list[Float[Array, "*B"]],
    grid: CausalGrid,
    with_forced: Array | bool = False,
) -> Lines:
    """The most lines per head that cost no more than its budget, by their ranks (0 is kept first).

    Of a head's lines, `vertical` are columns. `budgets` are the pairs that a head may keep, forced ones among them: of
    all rows, or of the rows before the grid's last rows and of the last rows. Without forced blocks there is at least
    one line, a diagonal.
    """
    if grid.length > MOST_TOKENS or grid.window is not None:
        raise ValueError(f"lines need a grid without window of at most {MOST_TOKENS} tokens; got {grid}")
    if len(budgets) not in (1, 2):
        raise ValueError(f"one budget for all rows, or two; got {len(budgets)}")
    middle = first_of_last(grid)
    parts = [(0, grid.length)] if len(budgets) == 1 else [(0, middle), (middle, grid.length)]
    forced = jnp.asarray(with_forced)
    found, pairs = [], jnp.zeros(columns.shape[:2], jnp.int32)
    for (first, end), budget in zip(parts, budgets, strict=True):
        plain, spared = (Cost.of(grid, first, end, forced=with_them) for with_them in (False, True))
        cost = jax.tree.map(lambda a, b: jnp.where(forced, b, a), plain, spared)
        fixed = jnp.where(forced, forced_pairs(grid, first, end), 0)
        room = jnp.broadcast_to(jnp.atleast_1d(budget)[:, None], columns.shape[:2]).astype(jnp.int32) - fixed

        kept = _most_that_fit(columns, diagonals, vertical, cost, room, jnp.where(forced, 0, 1))
        found.append(kept)
        pairs = pairs + cost.pairs(*kept) + fixed
    down, along = (jnp.stack(lines_of) for lines_of in zip(*found, strict=True))
    return Lines(columns=down, diagonals=along, with_forced=forced, pairs=pairs, grid=grid)


def _most_that_fit(
    columns: Int[Array, "B H T"],
    diagonals: Int[Array, "B H T"],
    vertical: Float[Array, "H"],
    cost: Cost,
    room: Int[Array, "B H"],
    least: Int[Array, ""],
) -> tuple[Bool[Array, "B H T"], Bool[Array, "B H T"]]:
    """Columns and diagonals, at least so many together, and as many as have room: by halving the numbers in doubt."""

    def lines(count: Int[Array, "B H"]) -> tuple[Array, Array]:
        down = jnp.floor(count.astype(jnp.float32) * vertical[None]).astype(jnp.int32)
        return columns < down[..., None], diagonals < (count - down)[..., None]

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        fit, too_many = bounds
        middle = (fit + too_many) // 2
        fits = cost.pairs(*lines(middle)) <= room
        return jnp.where(fits, middle, fit), jnp.where(fits, too_many, middle)

    most = 2 * columns.shape[-1]  # of so many lines, half are every column or every diagonal
    bounds = jnp.broadcast_to(least, room.shape).astype(jnp.int32), jnp.full(room.shape, most + 1, jnp.int32)
    return lines(jax.lax.fori_loop(0, most.bit_length() + 1, halve, bounds)[0])


class Cost(NamedTuple):
    """What lines cost in pairs, of the queries from one to another: `column[s]` and `diagonal[d]` alone, and between
    `start[s]` and `end[s]` the distances at which diagonals share a pair with column s."""

    column: Int[Array, "T"]
    diagonal: Int[Array, "T"]
    start: Int[Array, "T"]
    end: Int[Array, "T"]

    @classmethod
    def of(cls, grid: CausalGrid, first: int, end: int, *, forced: bool) -> Cost:
        """Pairs in forced blocks cost nothing if these are kept anyway."""
        b, rule = grid.block, grid.rule
        sink, near, dense = (rule.sink_blocks, rule.near_blocks, rule.dense_rows) if forced else (0, -1, 0)
        place = np.arange(grid.length)
        # The first query that pays for key s, and for diagonal d the first key and the least place in a block.
        query = np.maximum(np.maximum(place, (place // b + near + 1) * b), max(dense * b, first))
        query = np.where(place < sink * b, end, np.minimum(query, end))
        key = np.maximum(sink * b, max(dense * b, first) - place)
        least = np.clip((near + 1) * b - place, 0, b)

        def below(n: np.ndarray) -> np.ndarray:  # keys below n at such places
            return n // b * (b - least) + np.maximum(n % b - least, 0)

        diagonal = np.maximum(below(np.maximum(end - place, 0)) - below(key), 0)
        query = np.maximum(query, place)  # a key after the last query has none
        stop = np.maximum(end, place)
        found = np.maximum(end - query, 0), diagonal, np.minimum(query, stop) - place, stop - place
        return cls(*(jnp.asarray(x, jnp.int32) for x in found))

    def pairs(self, columns: Bool[Array, "*B T"], diagonals: Bool[Array, "*B T"]) -> Int[Array, "*B"]:
        nearer = jnp.cumsum(diagonals, -1, dtype=jnp.int32)
        nearer = jnp.pad(nearer, [(0, 0)] * (nearer.ndim - 1) + [(1, 0)])  # kept diagonals nearer than d
        shared = nearer[..., self.end] - nearer[..., self.start]
        return jnp.where(columns, self.column - shared, 0).sum(-1) + jnp.where(diagonals, self.diagonal, 0).sum(-1)


def pairs_of(grid: CausalGrid, first: int = 0, end: int | None = None) -> int:
    """Causal pairs of the queries from `first` to `end`."""
    end = grid.length if end is None else end
    return (end * (end + 1) - first * (first + 1)) // 2


def forced_pairs(grid: CausalGrid, first: int, end: int) -> int:
    """Causal pairs in forced blocks, of the queries from `first` to `end`, the starts of rows of blocks or the end."""
    sizes = grid.sizes.astype(np.int64)
    pairs = np.where(grid.distance() == 0, (sizes * (sizes + 1) // 2)[:, None], sizes[:, None] * sizes)
    rows = np.arange(grid.columns) * grid.block
    return int((pairs * grid.forced())[(rows >= first) & (rows < end)].sum())


def first_of_last(grid: CausalGrid) -> int:
    """The first query of the grid's last rows."""
    return (grid.columns - int(grid.last_rows().sum())) * grid.block


def recall(
    query: Float[Array, "B T H D"], key: Float[Array, "B T K D"], masks: list[Lines]
) -> Float[Array, "masks B H"]:
    """The mean over queries of the share of dense attention that lies inside each mask."""
    grid = masks[0].grid

    def row(keys: int, i: Array, q: Array) -> Array:
        weights = attention_rows(q, key[:, :keys], i, grid)
        real = (i * grid.block + jnp.arange(grid.block) < grid.length)[:, None]
        kept = [jnp.where(mask.seen(i, keys, key.shape[2]) & real, weights, 0).sum((-2, -1)) for mask in masks]
        return jnp.stack(kept)

    rows = scan_rows(row, query, key.shape[2], grid).sum(0)  # [masks, B, K, G]
    return rows.reshape(*rows.shape[:2], -1) / grid.length
