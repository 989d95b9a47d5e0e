"""Masks from a rule for single tokens: blocks are skipped, full, or partial with a bitmap.

No [q_len, kv_len] array exists: concrete masks are evaluated a row of blocks at a time, traced ones a block at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xsake._ground.buckets import power_of_two_at_least
from xsake.hads.mask.bitmaps import distinct, pack, words_of
from xsake.hads.mask.grid import Grid
from xsake.hads.mask.lists.mask_lists import MaskLists
from xsake.hads.mask.lists.rows import ArrayT
from xsake.hads.mask.lists.with_bitmaps import with_bitmap_per_slot, with_bitmaps

_AT_A_TIME = 2**20  # elements that a traced mask evaluates at a time


class Known(NamedTuple):
    """What is known of blocks without looking at elements, bool[b | 1, h | 1, nQ, nK] each."""

    active: ArrayT  # at least all blocks in which an element attends
    full: ArrayT  # blocks in which all do


class TokenRule:
    """function(q, k), function(h, q, k) if `heads` is given, or function(b, h, q, k) if `batch` is given too."""

    def __init__(self, function: Callable, batch: int | None, heads: int | None):
        if batch is not None and heads is None:
            raise ValueError(f"{batch=} also needs heads: the function is then called with (b, h, q, k)")
        for name, value in (("batch", batch), ("heads", heads)):
            if value is not None and (not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name}={value!r} must be an int of at least 1, or None")
        self._function, self._batch, self._heads = function, batch, heads

    def sample(self) -> Any:
        """The value for the first tokens, which tells whether the function uses traced arrays."""
        first = np.zeros((1, 1), np.int32)
        lead = () if self._heads is None else (np.int32(0),) * (1 if self._batch is None else 2)
        return _checked(self._function(*lead, first, first))

    def rows(self, q: np.ndarray, k: np.ndarray) -> Any:
        """[..., heads, rows, columns] for q [rows, 1] and k [1, columns]."""
        given: tuple = ()
        if self._heads is not None:
            given = (np.arange(self._heads)[:, None, None],)
        if self._batch is not None:
            given = (np.arange(self._batch)[:, None, None, None], given[0][None])
        return _checked(self._function(*given, q, k))

    def block(self, b: ArrayT, h: ArrayT, q: ArrayT, k: ArrayT) -> ArrayT:
        """[rows, columns] of one batch entry and head, all of them traced."""
        if self._heads is not None:
            value = self._function(*((h,) if self._batch is None else (b, h)), q, k)
        else:
            value = self._function(q, k)
        value = jnp.asarray(value)
        lead = value.shape[: max(value.ndim - 2, 0)]
        full = jnp.broadcast_to(value, (*lead, q.shape[0], k.shape[1]))
        full = full.reshape((1,) * (4 - full.ndim) + full.shape)
        return full[jnp.minimum(b, full.shape[0] - 1), jnp.minimum(h, full.shape[1] - 1)]


def _checked(value: Any) -> Any:
    value = value if hasattr(value, "dtype") else np.asarray(value)
    if value.dtype != np.bool_:
        raise TypeError(f"function must return booleans, got dtype {value.dtype}")
    if value.ndim > 4:
        raise ValueError(f"function must return at most [batch, heads, rows, columns]; got shape {value.shape}")
    return value


def mask_of_tokens(
    grid: Grid,
    function: Callable,
    *,
    batch: int | None = None,
    heads: int | None = None,
    known: Known | None = None,
    capacity: int | None = None,
    transpose: bool = True,
) -> MaskLists:
    """The mask of all elements for which the function and the grid's index rule hold.

    Without `known`, the function must not allow what the index rule deletes (ValueError, unless traced).
    """
    rule = TokenRule(function, batch, heads)
    value = rule.sample()
    lead = (1,) * (4 - max(value.ndim, 2)) + tuple(value.shape[:-2])
    if heads is not None:
        lead = (batch or 1, heads)
    build = _traced if isinstance(value, jax.core.Tracer) else _concrete
    return build(grid, rule, lead, known, capacity=capacity, transpose=transpose, density_hint=None)


def _concrete(grid: Grid, rule: TokenRule, lead: tuple[int, ...], known: Known | None, **options: Any) -> MaskLists:
    allowed, full = grid.allowed_and_full()
    shape = (*lead, grid.num_q, grid.num_kv)
    if known is None:
        maybe, sure = np.ones(shape, bool), np.zeros(shape, bool)
    else:
        maybe = np.broadcast_to(np.asarray(known.active) & allowed, shape)
        sure = np.broadcast_to(np.asarray(known.full) & full, shape)
    active, mixed, number = sure.copy(), np.zeros(shape, bool), np.zeros(shape, np.int32)
    all_ones = np.full((grid.block_kv, words_of(grid.block_q)), 2**32 - 1, np.uint32)
    table: dict[bytes, int] = {all_ones.tobytes(): 0}
    for i in range(grid.num_q):
        columns = np.flatnonzero((maybe[:, :, i] & ~sure[:, :, i]).any((0, 1)))
        if not columns.size:
            continue
        value, visible = _row_of_blocks(grid, rule, lead, i, columns, refuse=known is None)
        looked = maybe[:, :, i, columns] & ~sure[:, :, i, columns]
        some = value.any((2, 4)) & looked
        part = some & (value != visible).any((2, 4))
        active[:, :, i, columns] |= some
        mixed[:, :, i, columns] = part
        if part.any():
            b, h, c = np.nonzero(part)
            found, which = distinct(pack(np, value[b, h, :, c]))
            of_found = np.array([table.setdefault(x.tobytes(), len(table)) for x in found])
            number[b, h, i, columns[c]] = of_found[which]
    mask = MaskLists.of_active(active, full & ~mixed, grid, **options, traced=False)
    if not mixed.any():
        return mask
    bitmaps = np.frombuffer(b"".join(table), np.uint32).reshape(1, 1, len(table), *all_ones.shape)
    spare = power_of_two_at_least(len(table)) - len(table)  # so that new contents rarely compile anew
    bitmaps = np.pad(bitmaps, [(0, 0), (0, 0), (0, spare), (0, 0), (0, 0)])
    return with_bitmaps(mask, bitmaps, number)


def _row_of_blocks(
    grid: Grid, rule: TokenRule, lead: tuple[int, ...], i: int, columns: np.ndarray, *, refuse: bool
) -> tuple[np.ndarray, np.ndarray]:
    """What attends, bool[b, h, block_q, blocks, block_kv], and what the index rule leaves, with 1 for b and h."""
    q = (i * grid.block_q + np.arange(grid.block_q))[:, None]
    k = (columns[:, None] * grid.block_kv + np.arange(grid.block_kv)).reshape(1, -1)
    inside_q, inside_k = q[:, 0] < grid.q_len, k[0] < grid.kv_len
    rows, keys = inside_q.sum(), inside_k.sum()  # what is past the end comes last
    value = np.zeros((*lead, q.size, k.size), bool)
    value[:, :, :rows, :keys] = np.asarray(rule.rows(q[:rows], k[:, :keys]))
    allowed = np.broadcast_to(grid.band.allows(k - q), (q.size, k.size))
    if refuse and (deleted := value & ~allowed).any():
        row, column = np.argwhere(deleted)[0][-2:]
        raise ValueError(
            f"the token function allows (query {q[row, 0]}, key {k[0, column]}), which is_causal=True deletes: add "
            f"`& (k <= q)` to the function if it is to be causal, or leave out is_causal if it is not"
        )
    visible = (allowed & inside_q[:, None] & inside_k[None, :])[None, None]
    shape = (q.size, columns.size, grid.block_kv)
    return (value & visible).reshape(*lead, *shape), visible.reshape(1, 1, *shape)


def _traced(grid: Grid, rule: TokenRule, lead: tuple[int, ...], known: Known | None, **options: Any) -> MaskLists:
    allowed, full = grid.allowed_and_full()
    shape = (*lead, grid.num_q, grid.num_kv)

    def evaluate(b: Any, h: Any, q: Any, k: Any) -> Any:
        """bool[rows, columns] for the numbers of query and key tokens, [rows] and [columns]."""
        q, k = q[:, None], k[None, :]
        inside = (q < grid.q_len) & (k < grid.kv_len) & grid.band.allows(k - q)
        return rule.block(b, h, jnp.minimum(q, grid.q_len - 1), jnp.minimum(k, grid.kv_len - 1)) & inside

    def classify(place: tuple) -> tuple:
        b, h, i = place
        q = i * grid.block_q + jnp.arange(grid.block_q, dtype=jnp.int32)
        value = evaluate(b, h, q, jnp.arange(grid.num_kv * grid.block_kv, dtype=jnp.int32))
        blocks = value.reshape(grid.block_q, grid.num_kv, grid.block_kv)
        return blocks.any((0, 2)), blocks.all((0, 2))

    if known is None:
        places = [jnp.asarray(x.reshape(-1), jnp.int32) for x in np.indices(shape[:3])]
        active, all_of = (x.reshape(shape) for x in lax.map(classify, tuple(places)))
    else:
        active, all_of = (jnp.broadcast_to(x, shape) for x in known)
    active, all_of = active & allowed[None, None], all_of & full[None, None]
    mask = MaskLists.of_active(active, all_of, grid, **options, traced=True)

    def bitmaps_of(row: Any, column: Any) -> Any:
        b, h, _ = np.indices(row.shape)

        def one(place: tuple) -> Any:
            b, h, i, j = place
            q = i * grid.block_q + jnp.arange(grid.block_q, dtype=jnp.int32)
            return pack(jnp, evaluate(b, h, q, j * grid.block_kv + jnp.arange(grid.block_kv, dtype=jnp.int32)))

        places = tuple(jnp.asarray(x, jnp.int32).reshape(-1) for x in (b, h, row, column))
        together = max(1, _AT_A_TIME // (grid.block_q * grid.block_kv))
        return lax.map(one, places, batch_size=together).reshape(*row.shape, grid.block_kv, -1)

    return with_bitmap_per_slot(mask, bitmaps_of)
