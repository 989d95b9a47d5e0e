"""Merged lists of neighbouring mask rows: what each row lists, once, and in the order that two warpgroups need."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsake
from xsake.kernels_pallas_gpu.lists.row_pairs import OWNERS, row_pairs

BOTH = 3


def lists_of(blocks: np.ndarray, full: np.ndarray, spare: int = 3) -> tuple[jax.Array, ...]:
    """`RowLists` of one head, the full blocks of odd rows in descending order: any order will do."""
    rows = []
    for number, (listed, is_full) in enumerate(zip(blocks, full, strict=True)):
        first = np.flatnonzero(listed & is_full)
        rows.append((first[::-1] if number % 2 else first, np.flatnonzero(listed & ~is_full)))
    row_ptr = np.cumsum([0, *(len(a) + len(b) for a, b in rows)])
    indices = np.concatenate([np.concatenate(row) for row in rows] + [np.zeros(spare, np.int64)])
    num_full = [len(a) for a, _ in rows]
    return tuple(jnp.asarray(x, jnp.int32)[None, None] for x in (indices, row_ptr, num_full))


@pytest.mark.parametrize(
    ("rows", "columns", "density"), [(8, 8, 0.5), (7, 40, 0.3), (6, 300, 0.8), (3, 300, 1.0), (5, 20, 0.0), (1, 9, 0.5)]
)
def test_every_row_gets_its_blocks(rows, columns, density):
    rng = np.random.default_rng(rows)
    blocks, full = rng.random((rows, columns)) < density, rng.random((rows, columns)) < 0.8
    lists = lists_of(blocks, full)
    with xsake.interpret():
        found = row_pairs(*lists)
    found = type(found)(*(np.asarray(x)[0, 0] for x in found))
    padded, padded_full = (np.pad(x, ((0, rows % 2), (0, 0))) for x in (blocks, full))
    for pair in range(len(found.begins)):
        entries = found.indices[found.begins[pair] :][: found.num_entries[pair]]
        block, owners = np.divmod(entries, OWNERS)
        num_both, by_turns = found.num_both[pair], found.by_turns[pair]
        listed, is_full = padded[2 * pair : 2 * pair + 2], padded_full[2 * pair : 2 * pair + 2]
        for row in range(2):
            own = block[owners >> row & 1 == 1]
            assert sorted(own) == np.flatnonzero(listed[row]).tolist()
        in_both = (listed & is_full).all(0)
        assert num_both == in_both.sum() // 2 * 2 and in_both[block[:num_both]].all()
        assert (owners[:num_both] == BOTH).all() and (owners[num_both:] != BOTH).all()
        alone = owners[num_both:].tolist()
        fewer = min(alone.count(1), alone.count(2))
        assert alone[: 2 * fewer] == [1, 2] * fewer
        for turn in range(by_turns):
            first, second = block[num_both + 2 * turn :][:2]
            assert is_full[0, first] and is_full[1, second]
    lengths = np.diff(np.asarray(lists[1])[0, 0])
    of_pairs = np.pad(lengths, (0, rows % 2)).reshape(-1, 2).sum(1)[found.order]
    assert sorted(found.order) == list(range(len(found.order))) and (np.diff(of_pairs) <= 0).all()
