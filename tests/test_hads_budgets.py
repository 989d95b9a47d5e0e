"""Masks have exactly the number of blocks that their budgets give."""

from __future__ import annotations

import dataclasses

import hads_case as case
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from xsake import hads
from xsake.hads.profile import budgets
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.rule import Rule


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.floats(0, 1))
def test_apportion_is_exact_fair_and_within_its_room(seed: int, parts: int, share: float):
    rng = np.random.default_rng(seed)
    room, weights = rng.integers(0, 50, parts), rng.exponential(size=parts) * rng.integers(0, 2, parts)
    total = round(share * int(room.sum()))
    got = budgets.apportion(weights, total, room)
    assert got.sum() == total and (got <= room).all() and (got >= 0).all()
    ratio = got[(got < room) & (weights > 0)] / weights[(got < room) & (weights > 0)]
    if len(ratio) > 1:  # those that are not full differ by one unit at most
        assert np.ptp(ratio) <= 2 / weights[(got < room) & (weights > 0)].min()


def test_totals_are_apportioned_each_for_itself():
    rng = np.random.default_rng(0)
    room, weights, totals = rng.integers(0, 50, 30), rng.exponential(size=(4, 30)), np.array([0, 77, 400, 500])
    each = [budgets.apportion(row, int(total), room) for row, total in zip(weights, totals, strict=True)]
    np.testing.assert_array_equal(budgets.apportion(weights, totals, room), each)
    with pytest.raises(ValueError, match="must be between 0 and the room of"):
        budgets.apportion(weights, totals + 1000, room)


@given(st.integers(0, 100), st.integers(100, 5000), st.integers(1, 3))
def test_counts_sum_to_the_budget_between_forced_and_all(seed: int, length: int, heads_each: int):
    profile = case.random_profile(seed, q_heads=2 * heads_each, kv_heads=2, layers=3)
    grid = CausalGrid(length, profile.block)
    least = grid.forced_blocks / grid.blocks
    for budget in (least, (least + 1) / 2, 1.0):
        wanted = round(budget * 3 * profile.q_heads * grid.blocks)
        layers = budgets.layer_counts(profile, budget, length)
        heads = budgets.head_counts(profile, budget, length)
        even = budgets.uniform_counts(3, profile.q_heads, budget, grid)
        assert layers.sum() == heads.sum() == even.sum() == wanted
        assert np.ptp(even) <= 1
        assert heads.sum(1).tolist() == layers.tolist()
        assert (heads >= grid.forced_blocks).all() and (heads <= grid.blocks).all()


def test_layers_get_what_the_table_says():
    profile = case.random_profile()
    grid = CausalGrid(4096, profile.block)
    free = profile.layers * profile.q_heads * (grid.blocks - grid.forced_blocks)
    forced = profile.layers * profile.q_heads * grid.forced_blocks
    budget = (float(profile.free_shares[1]) * free + forced) / (free + forced)
    counts = budgets.layer_counts(profile, budget, 4096) - profile.q_heads * grid.forced_blocks
    np.testing.assert_allclose(
        counts / counts.sum(), profile.layer_shares[1] / profile.layer_shares[1].sum(), rtol=1e-3
    )


def test_forced_blocks_are_sink_previous_diagonal_and_the_first_rows():
    for n in (1, 2, 3, 4, 5, 20):
        grid = CausalGrid(16 * n - 3, 16)
        assert (grid.forced() == case.forced_blocks(n)).all()
        assert grid.sizes.sum() == grid.length and grid.blocks == n * (n + 1) // 2


@pytest.mark.parametrize("window", [None, 1, 20, 70])
@pytest.mark.parametrize("length", [29, 96, 121])
def test_rows_may_be_taller_than_blocks(length: int, window: int | None):
    """Block by block from the tokens that see each other."""
    rule = Rule(sink_blocks=1, near_blocks=2, dense_rows=1, exact_queries=33)
    grid = CausalGrid(length, 8, rule, window, block_q=32)
    padded = np.zeros((grid.rows * 32, grid.columns * 8), bool)
    padded[:length, :length] = case.visible(length, window)
    tiles = padded.reshape(grid.rows, 32, grid.columns, 8)
    seen = tiles.any((1, 3))
    assert (grid.causal() == seen).all() and (grid.full() == tiles.all((1, 3))).all()
    assert grid.blocks == seen.sum() and (grid.distance() >= 0).sum() == CausalGrid(length, 8, block_q=32).blocks
    row, column = np.indices(seen.shape)
    forced = seen & ((column == 0) | (column >= 4 * row - 2) | (row == 0))
    assert (grid.forced() == forced).all() and grid.forced_blocks == forced.sum()
    last = [32 * (i + 1) > length - 33 for i in range(grid.rows)]
    assert grid.row_weights().tolist() == np.where(last, rule.last_weight, 1).tolist()


def test_rows_are_whole_blocks_high():
    with pytest.raises(ValueError, match="block_q=40 must be a multiple of block=16"):
        CausalGrid(96, 16, block_q=40)


def test_a_budget_under_the_forced_share_names_it():
    with pytest.raises(ValueError, match=r"budget=0.05 is below 0.0913, .* 4096 tokens in blocks of 64"):
        hads.layer_counts(case.random_profile(block=64), 0.05, 4096)


def test_thresholds_fall_with_the_budget():
    profile = case.random_profile()
    values = [budgets.threshold(profile, b, 1024) for b in (0.2, 0.4, 0.6, 1.0)]
    assert values == sorted(values, reverse=True) and values[-1] == 0


@pytest.mark.parametrize(("window", "block_q"), [(None, 16), (200, 16), (None, 64)])
def test_chunks_divide_the_budget_as_rows_that_compete(window: int | None, block_q: int):
    rule = Rule.of_blocks(block_q // 16)
    profile = dataclasses.replace(case.random_profile(block_q=block_q), window=window, rule=rule)
    lengths, heads, chunk = [1024, 700], profile.q_heads, 256
    counts = budgets.chunk_counts(profile, 0.5, lengths, chunk)
    for n, length in enumerate(lengths):
        grid = profile.grid(length)
        assert counts[:, :, n].sum(0).tolist() == budgets.layer_counts(profile, 0.5, length).tolist()
        starts = np.arange(0, grid.rows, chunk // grid.block_q)
        forced, allowed = (heads * np.add.reduceat(x.sum(-1), starts) for x in (grid.forced(), grid.causal()))
        mine = counts[: len(starts), :, n].T
        assert (mine >= forced).all() and (mine <= allowed).all()
        share = (mine - forced) / (allowed - forced)
        # Rows of a window are all alike; others need a smaller share of their blocks the longer they are.
        assert (np.diff(share[:, :-1]) < 0).all() if window is None else (np.ptp(share[:, 1:-1], -1) < 0.05).all()
