"""Equal counts for the shards of a sequence: `hads.select(..., shards=n)`."""

from __future__ import annotations

from functools import partial

import hads_case as case
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from sweep import sweep

from xsake import hads
from xsake.hads.mask.lists.order import shard_of_rows
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection import choice, program
from xsake.hads.selection.cut import TOGETHER, Cut, equal_counts
from xsake.hads.selection.given import Given
from xsake.hads.selection.rows import Rows

_select = jax.jit(partial(hads.select, layer=1, shards=8, transpose=False), static_argnames="order")


def by_shard(mask: hads.BlockMask, shards: int, order: str) -> np.ndarray:
    """Blocks of each sequence and shard."""
    per_row = np.asarray(mask.to_blocks()).sum((1, 3))
    shard = shard_of_rows(per_row.shape[1], shards, order)
    return np.stack([per_row[:, shard == s].sum(1) for s in range(shards)], 1)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=4, max_size=4), st.floats(0, 1))
def test_equal_counts_are_as_equal_as_their_bounds_allow(bounds: list[tuple[int, int]], share: float):
    least = np.array([low for low, _ in bounds], np.int32)
    most = least + np.array([room for _, room in bounds], np.int32)
    total = int(least.sum() + round(share * (most - least).sum()))
    got = np.asarray(equal_counts(jnp.array(total, jnp.int32), least, most))
    assert got.sum() == total and (least <= got).all() and (got <= most).all()
    # No block can move from a larger count to a smaller one.
    assert all(
        got[a] <= got[b] + 1 for a in range(len(got)) for b in range(len(got)) if got[a] > least[a] and got[b] < most[b]
    )


@pytest.mark.parametrize("length", sweep([1024, 1000], slow=[1024]))
def test_every_shard_gets_as_many_blocks(length: int):
    profile = case.random_profile()
    query, key = case.random_inputs(1, length, profile, batch=2)
    counts = hads.layer_counts(profile, 0.43, length).astype(np.int32)
    mask = _select(query, key, profile, counts, order="zigzag")
    found = by_shard(mask, 8, "zigzag")
    assert found.sum(1).tolist() == [counts[1]] * 2 and (np.ptp(found, axis=1) <= 1).all()
    assert np.asarray(mask.to_blocks())[:, :, case.forced_blocks(-(-length // 16))].all()


@pytest.mark.slow
def test_contiguous_shards_get_as_many_blocks_as_causality_leaves_them():
    profile = case.random_profile()
    query, key = case.random_inputs(1, 1024, profile)
    counts = hads.layer_counts(profile, 0.43, 1024).astype(np.int32)
    found = by_shard(_select(query, key, profile, counts), 8, "contiguous")[0]
    rooms = [4 * sum(range(8 * s + 1, 8 * s + 9)) for s in range(2)]
    assert found[:2].tolist() == rooms and np.ptp(found[2:]) <= 1


@pytest.mark.slow
def test_one_shard_is_the_whole_sequence():
    profile = case.random_profile()
    query, key = case.random_inputs(2, 512, profile)
    for options in ({}, {"mode": "static"}, {"per": "kv_head"}):
        chosen = partial(hads.select, query, key, profile, 0.5, layer=0, **options)
        assert np.array_equal(chosen(shards=1).to_blocks(), chosen().to_blocks())


def test_a_shard_keeps_the_best_blocks_of_its_rows():
    """Each shard's rows are those that all rows would keep if the count of all were cut at the shard's gain."""
    grid = CausalGrid(20 * 16, 16)
    rng = np.random.default_rng(3)
    mass = (rng.exponential(size=(1, 2, 20, 20)) ** 3 * np.tri(20)).astype(np.float32)
    mass /= mass.sum(-1, keepdims=True)
    rule = dict(sensitivity=np.ones(2, np.float32), burstiness=np.zeros(2, np.float32))
    kept = np.asarray(_choose(mass, grid, 300, cut=Cut(4, "zigzag"), **rule))[0]
    shard = shard_of_rows(20, 4, "zigzag")
    for s in range(4):
        wanted = int(kept[:, shard == s].sum())
        for count in range(150, 400):  # of all rows
            alone = np.asarray(_choose(mass, grid, count, **rule))[0, :, shard == s]
            if alone.sum() == wanted:
                assert np.array_equal(alone, kept[:, shard == s].swapaxes(0, 1))
                break
        else:
            pytest.fail(f"no common cut gives shard {s} its {wanted} blocks")


@partial(jax.jit, static_argnames=("grid", "cut"))
def _choose(mass, grid, count, cut=TOGETHER, **rule):
    return choice.choose(mass, Rows(grid), count=count, cut=cut, **rule)


@pytest.mark.usefixtures("unchecked_annotations")
def test_wrong_calls():
    profile = case.random_profile()
    chosen = partial(hads.select, *case.random_inputs(11, 256, profile), profile, 0.5, layer=0)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="must be an int of at least 1"):
            chosen(shards=wrong)
    with pytest.raises(ValueError, match="order='stripes' must be one of 'contiguous', 'zigzag'"):
        chosen(shards=2, order="stripes")
    with pytest.raises(ValueError, match="give shards, or leave order out"):
        chosen(order="zigzag")
    with pytest.raises(ValueError, match="give shards another mode"):
        chosen(shards=2, mode="elastic")


@pytest.mark.gpu
def test_equal_counts_on_a_gpu():
    """By kernels: counts are exact, and nearly all blocks are XLA's."""
    profile = case.random_profile(q_heads=8, kv_heads=2, head_dim=128, block=64)
    query, key = (jnp.asarray(x, jnp.bfloat16) for x in case.random_inputs(5, 8192, profile))
    counts = hads.layer_counts(profile, 0.3, 8192).astype(np.int32)
    grid, cut = profile.grid(8192), Cut(8, "zigzag")
    given = jax.tree.map(jnp.asarray, Given(query, key, *profile.weights(1), {"count": counts[1]}))
    wanted = np.asarray(jax.jit(partial(program._by_xla, grid, 8, None, cut=cut))(given))
    mask = _select(query, key, profile, counts, order="zigzag")
    assert np.ptp(by_shard(mask, 8, "zigzag")) <= 1
    assert (np.asarray(mask.to_blocks()) & wanted).sum() > 0.99 * counts[1]
