"""How much of dense attention each block holds, measured one row of blocks at a time: there is never a [T, S] array."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.exact import row_statistics
from xsake.hads.selection.pooled import row_bounds


class BlockStatistics(NamedTuple):
    """The mass of each block of causal attention, for every query head.

    `mass[b, h, i, j]` is the attention that a query of row i gives to the keys of block j, as a mean over the queries
    of row i: a row sums to 1. `square` is the mean of its square, so that `square - mass ** 2` is its variance.
    """

    mass: Float[Array, "B H rows n"]
    square: Float[Array, "B H rows n"]

    @property
    def share(self) -> Float[Array, "B H rows n"]:
        """The root of `square`, as a share of its row: what HADS estimates. Where only a few queries need a block, the
        mean would hide the need."""
        root = jnp.sqrt(self.square)
        return root / root.sum(-1, keepdims=True)


def block_statistics(
    query: Float[Array | np.ndarray, "B T H D"],
    key: Float[Array | np.ndarray, "B T K D"],
    *,
    block: int,
    block_q: int = 0,
    window: int | None = None,
) -> BlockStatistics:
    """Dense causal attention's statistics, in float32; memory grows with `block_q * T`, not with T ** 2.

    A row has `block_q` queries, by default as many as a block has keys. With a `window`, a token sees itself and the
    `window - 1` tokens before it.

    >>> import jax
    >>> x = jax.random.normal(jax.random.key(0), (1, 256, 2, 16))
    >>> block_statistics(x, x, block=64).mass.shape
    (1, 2, 4, 4)
    """
    query, key = jnp.asarray(query), jnp.asarray(key)
    grid = CausalGrid(query.shape[1], block, window=window, block_q=block_q)

    def row(keys: int, i: Array, q: Float[Array, "B K G block_q D"]) -> tuple[Array, Array]:
        return row_statistics(q, key[:, :keys], i, grid, grid.length)

    mass, square = scan_rows(row, query, key.shape[2], grid)

    def heads(x: Array) -> Array:  # [n, B, K, G, ...] of the scan to [B, H, n, ...]
        x = jnp.moveaxis(x, 0, 3)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    return BlockStatistics(heads(mass), heads(square))


def scan_rows(row: Callable[..., Any], query: Array, kv_heads: int, grid: CausalGrid, *more: Array) -> Any:
    """`row(keys, i, q, ...)` for every row i of blocks, one after the other, with its queries [B, K, G, block_q, D].

    `more` are arrays like the query, cut the same way. The tail of the last row is 0. A row sees no key but the first
    `keys`, a number that few programs are compiled for. A CPU takes one row at a time, an accelerator as many rows as
    have a gigabyte of logits.
    """

    def rows(x: Array) -> Array:
        b, _, h, d = x.shape
        x = jnp.pad(x, ((0, 0), (0, grid.rows * grid.block_q - grid.length), (0, 0), (0, 0)))
        x = x.reshape(b, grid.rows, grid.block_q, kv_heads, h // kv_heads, d)
        return x.transpose(1, 0, 3, 4, 2, 5)

    # Behind a barrier: a compiler that knows the rows' numbers works out their causal masks itself, for minutes.
    numbers = jax.lax.optimization_barrier(jnp.arange(grid.rows))
    whole = numbers, rows(query), *map(rows, more)
    row_bytes = 4 * query.shape[0] * query.shape[2] * grid.block_q
    parts = []
    for first, end in itertools.pairwise(row_bounds(grid.rows)):
        keys = min(end * grid.block_q, grid.length)
        at_once = _rows_at_once(row_bytes * keys, end - first)
        some = jax.tree.map(lambda x, first=first, end=end: x[first:end], whole)
        parts.append(jax.lax.map(lambda x, keys=keys: row(keys, *x), some, batch_size=at_once))
    return jax.tree.map(lambda *each: jnp.concatenate(each), *parts)


def _rows_at_once(row_bytes: int, rows: int) -> int | None:
    """The largest divisor of `rows` with at most a gigabyte of logits; None, one at a time, on a CPU for its caches."""
    if jax.default_backend() == "cpu":
        return None
    most = max(2**30 // row_bytes, 1)
    return max(n for n in range(1, rows + 1) if rows % n == 0 and n <= most)
