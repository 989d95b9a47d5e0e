"""The reader of TPU schedules, and the cycles that rank tilings: counted as the kernels walk a mask."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.harness.tpu_cycles import GRID_STEP, cycles, masks_like_hads, ours_in_all
from benchmarks.harness.tpu_schedule import TILE, measure, read_schedule

# A step of 9 bundles with two loops: the first has 3 bundles, 2 of them in the region of its products, the second 2.
BUNDLES = """
     0   :  { %0 = smov } /* Start region 0 */
   0x1 LB: > { %1 = smov } /* Start region 1 */
   0x2 LB: >> { %2 = smov } /* Start region 2 */
   0x3   : >> { %3 = vmatmul } /* Start region 3 */
   0x4   : >> { %4 = vmatmul } /* End region 3 */ /* End region 2 */
   0x5   : > { %5 = smov }
   0x6 LB: >> { %6 = vmatmul } /* Start region 4 */
   0x7   : >> { %7 = smov } /* End region 4 */
   0x8   : > { %8 = smov } /* End region 1 */ /* End region 0 */
"""
MXU = [0, 0, 0, 4, 4, 0, 4, 0, 0]


@pytest.fixture
def dump(tmp_path):
    (tmp_path / "17-kernel.1-02-packed-bundles-post-ra.txt").write_text(BUNDLES)
    usage = "\n".join(" ".join([str(m), *["0"] * 9]) for m in MXU)
    table = f"== CAPACITY\nnames\n4 3 4 2 1 3 3 1 1 2\n== UTILIZATION\n{usage}\n"
    (tmp_path / "17-kernel.1-03-pre-delay_hlo-static-per-bundle-utilization.txt").write_text(table)
    sizes = "#allocation2 [shape = 'x', space=vmem, size = 0x100, scoped, tag]\n#a [space=smem, size = 0x8, scoped]\n"
    (tmp_path / "17-kernel.1-00-pre-finalize-registers-and-allocations.txt").write_text(sizes)
    return tmp_path


def test_reads_loops_steps_and_memory(dump):
    schedule = read_schedule(dump, "kernel")
    measured = measure(schedule, [512 * 1024, 512 * 512])
    first, second = measured["loops"]
    assert (first["inner"], first["loop"], first["mxu"]) == (1.0, 1.5, 1.0)
    assert (second["inner"], second["loop"], second["mxu"]) == (2.0, 2.0, 0.5)
    assert measured["step"] == 8 - 3 - 2
    assert (measured["vmem_bytes"], measured["smem_bytes"]) == (256, 8)


def test_no_such_kernel(dump):
    with pytest.raises(FileNotFoundError, match="'other'"):
        read_schedule(dump, "other")


@pytest.mark.parametrize("causal", [False, True])
def test_cost_follows_active_blocks(causal):
    """Heads from 10% to 90% cost what equal heads with as many blocks cost: steps without work cost nothing."""
    unequal, uniform = masks_like_hads(causal)
    assert unequal.sum() == uniform.sum()
    row = {
        "tiling": {"wide": 2, "narrow": 1},
        "areas": [2 * 512 * 512, 512 * 512],
        "loops": [{"inner": 1200.0, "loop": 1250.0}, {"inner": 1400.0, "loop": 1450.0}],
        "step": 700,
    }
    cost, even = (ours_in_all(m, causal, row) for m in (unequal, uniform))
    assert cost["plain"] <= 1.1 * even["plain"]
    assert cost["strict"] <= 1.1 * even["strict"]


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
