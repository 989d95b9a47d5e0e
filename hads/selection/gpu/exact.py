"""`selection.exact` as GPU kernels: the estimated logits of the last rows are overwritten by the logs of exact masses.

The first kernel takes the rows' queries to the logsumexp of their logits with each block's keys. The second takes
these to the queries' weights of each block, and the weights to the root of their mean square over the row's queries.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Float

from xsake.hads.mask.lists.triton_call import TILE, iota, padded, triton_call, whole
from xsake.hads.selection.rows import Rows

_CHUNK = 16  # blocks of keys per program
_SUMS_WARPS, _SUMS_STAGES, _MASSES_WARPS = 4, 2, 8
_LOWEST = -1e30
_LOG2_E = math.log2(math.e)


def with_exact_rows(
    logits: Float[Array, "B H m width"], query: Float[Array, "B T H D"], key: Float[Array, "B S K D"], rows: Rows
) -> Float[Array, "B H m width"]:
    """`exact.with_exact_rows` for `padded` logits, whose rows are normalised later."""
    if not rows.exact:
        return logits
    return _masses(logits, _sums(query, key, rows), rows)


def _sums(
    query: Float[Array, "B T H D"], key: Float[Array, "B S K D"], rows: Rows
) -> Float[Array, "B H exact columns block_q"]:
    """The base-2 logsumexp of each query's logits with each block's keys; not written past a row's own blocks."""
    b, tokens, h, d = query.shape
    grid, block, block_q, group = rows.grid, rows.grid.block, rows.grid.block_q, h // key.shape[2]
    chunks, columns = -(-grid.columns // _CHUNK), padded(grid.columns)[0]

    def kernel(query_ref: Any, key_ref: Any, length_ref: Any, out_ref: Any) -> None:
        number, begin = lax.div(pl.program_id(0), chunks), lax.rem(pl.program_id(0), chunks) * _CHUNK
        row, _ = _row_and_end(rows, number, length_ref)

        def load(ref: Any, at: Any, size: int, end: int) -> Array:
            """The `size` tokens from token `at` on, of which those before `end` are there."""
            inside = jnp.broadcast_to((at + iota(size) < end)[:, None], (size, d))
            return plgpu.load(ref.at[pl.ds(at, size), :], mask=inside, other=0.0)

        q = load(query_ref, (row - rows.first) * block_q, block_q, tokens)

        def step(j: Array, _: None) -> None:
            k = load(key_ref, j * block, block, grid.length)
            x = lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
            place = (j - row * grid.tall) * block + iota(block)  # of the keys, from the row's first query on
            x = jnp.where(iota(block_q)[:, None] >= place[None, :], x * (d**-0.5 * _LOG2_E), -jnp.inf)
            most = jnp.maximum(x.max(1), _LOWEST)  # the first queries of a tall row may see no key of its last block
            out_ref[j, :] = most + jnp.log2(jnp.exp2(x - most[:, None]).sum(1))

        lax.fori_loop(begin, jnp.minimum(begin + _CHUNK, rows.blocks_of(row, length_ref)), step, None)

    def at(place: Any, head: Any, b: Any) -> tuple:
        return b, head, lax.div(place, chunks), 0, 0

    (out,) = triton_call(
        kernel,
        "hads_exact_sums",
        (rows.exact * rows.number_of_ends * chunks, h, b),
        [
            (query, pl.BlockSpec((None, tokens, None, d), lambda _, head, b: (b, 0, head, 0))),
            (key, pl.BlockSpec((None, key.shape[1], None, d), lambda _, head, b: (b, 0, lax.div(head, group), 0))),
            rows.input(b),
        ],
        [
            (
                (b, h, rows.exact * rows.number_of_ends, columns, block_q),
                jnp.float32,
                pl.BlockSpec((None, None, None, columns, block_q), at),
            )
        ],
        num_warps=_SUMS_WARPS,
        num_stages=_SUMS_STAGES,
    )
    return out


def _row_and_end(rows: Rows, number: Array, length_ref: Any) -> tuple[Array, Any]:
    """(a row that may need exact masses, and the end before which it stands), of a program's number."""
    end = rows.end(length_ref, lax.div(number, jnp.int32(rows.exact)))
    return rows.begin_of_exact(end) + lax.rem(number, jnp.int32(rows.exact)), end


def _masses(
    logits: Float[Array, "B H m width"], sums: Float[Array, "B H exact columns block_q"], rows: Rows
) -> Float[Array, "B H m width"]:
    b, h, m, width = logits.shape
    block_q, columns = rows.grid.block_q, sums.shape[3]

    def kernel(sums_ref: Any, estimated_ref: Any, length_ref: Any, out_ref: Any) -> None:
        row, end = _row_and_end(rows, pl.program_id(0), length_ref)
        counts = (row * block_q + iota(block_q) < rows.end(length_ref))[None, :]
        blocks = rows.blocks_of(row, length_ref)

        @pl.when((row >= rows.grid.first_exact(end)) & (row * block_q < end))
        def _() -> None:
            tiles = lax.div(blocks - 1, TILE) + 1

            def load(tile: Array) -> tuple[Array, Array]:
                column = tile * TILE + iota(TILE)
                there = jnp.broadcast_to((column < blocks)[:, None], (TILE, block_q))
                return column, plgpu.load(sums_ref.at[pl.ds(tile * TILE, TILE), :], mask=there, other=_LOWEST)

            def add(tile: Array, about: tuple[Array, Array]) -> tuple[Array, Array]:
                most, total = about
                _, x = load(tile)
                larger = jnp.maximum(most, x.max(0))
                return larger, total * jnp.exp2(most - larger) + jnp.exp2(x - larger[None, :]).sum(0)

            most, total = lax.fori_loop(
                0, tiles, add, (jnp.full(block_q, _LOWEST, jnp.float32), jnp.zeros(block_q, jnp.float32))
            )
            whole_row = most + jnp.log2(total)

            def write(tile: Array, _: None) -> None:
                column, x = load(tile)
                weight = jnp.where(counts, jnp.exp2(x - whole_row[None, :]), 0.0)
                log_mass = 0.5 * jnp.log((weight * weight).sum(1))  # up to a constant of the row
                plgpu.store(out_ref.at[row - rows.first, pl.ds(tile * TILE, TILE)], log_mass, mask=column < blocks)

            lax.fori_loop(0, tiles, write, None)

    logits_spec = whole(None, None, m, width)
    (out,) = triton_call(
        kernel,
        "hads_exact_masses",
        (sums.shape[2], h, b),
        [
            (sums, pl.BlockSpec((None, None, None, columns, block_q), lambda number, h, b: (b, h, number, 0, 0))),
            (logits, logits_spec),
            rows.input(b),
        ],
        [(logits.shape, logits.dtype, logits_spec)],
        num_warps=_MASSES_WARPS,
        aliases={1: 0},
    )
    return out
