"""The cycles that rank TPU tilings are counted as the kernels walk a mask."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.tpu.schedule import GRID_STEP, TILE, cycles

TILING = {"own": 512, "entry": 512, "wide": 2, "narrow": 1, "compute": 512, "fold": 1, "mixed": False}


def row(**changes) -> dict:
    """Loops of 1000 and 1500 cycles per 512 x 512 tile, and 100 cycles for the rest of a step."""
    tiling = TILING | changes
    area = tiling["own"] * tiling["fold"] * tiling["entry"]
    loops = [{"loop": 1000.0}, {"loop": 1500.0}]
    return {"tiling": tiling, "areas": [area * tiling["wide"], area * tiling["narrow"]], "loops": loops, "step": 100}


BLOCKS = np.tril(np.ones((1, 4, 4), bool))  # rows of 0, 1, 2, 3 full blocks, and one on the diagonal each
STEP = 100 + GRID_STEP


def test_full_blocks_fill_wide_chunks_and_the_rest_is_narrow():
    assert cycles(row(), BLOCKS, True, 512) == 4 * STEP + 2 * 2000 + (1 + 2 + 1 + 2) * 1500
    assert cycles(row(), BLOCKS, False, 512) == 4 * STEP + 4 * 2000 + 2 * 1500, "without a rule all blocks are full"
    assert cycles(row(mixed=True), BLOCKS, True, 512) == cycles(row(), BLOCKS, False, 512)


def test_mixed_chunks_need_not_be_filled():
    """Rows of 1, 2, 3 and 4 blocks of 4 entries: a wide chunk of 16 entries is used if more than half of it is full."""
    tested = row(entry=128, wide=16, narrow=4, mixed=True)
    assert cycles(tested, BLOCKS, True, 512) == pytest.approx(4 * STEP + (1 + 2) * 1500 + 2 * 4000)


def test_short_steps_walk_the_list_more_often():
    half = cycles(row(own=256), BLOCKS, True, 512)
    assert half - 8 * STEP == pytest.approx(cycles(row(), BLOCKS, True, 512) - 4 * STEP)


def test_heads_that_share_a_step():
    two = np.repeat(BLOCKS, 2, axis=0)
    assert cycles(row(fold=2), two, True, 512) - 4 * STEP == pytest.approx(cycles(row(), two, True, 512) - 8 * STEP)


def test_entries_are_parts_of_blocks():
    assert TILE == 512 * 512
    quarter = cycles(row(entry=128, wide=8, narrow=4), BLOCKS, True, 512)
    assert quarter == pytest.approx(cycles(row(), BLOCKS, True, 512))
