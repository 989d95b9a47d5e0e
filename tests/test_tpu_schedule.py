"""The reader of TPU schedules and the estimate of whole calls, on a schedule written by hand."""

from __future__ import annotations

import pytest

from benchmarks.tpu import schedule as tpu_schedule

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
    schedule = tpu_schedule.read_schedule(dump, "kernel")
    measured = tpu_schedule.measure(schedule, [512 * 1024, 512 * 512])
    first, second = measured["loops"]
    assert (first["inner"], first["loop"], first["mxu"]) == (1.0, 1.5, 1.0)
    assert (second["inner"], second["loop"], second["mxu"]) == (2.0, 2.0, 0.5)
    assert measured["step"] == 8 - 3 - 2
    assert (measured["vmem_bytes"], measured["smem_bytes"]) == (256, 8)


def test_no_such_kernel(dump):
    with pytest.raises(FileNotFoundError, match="'other'"):
        tpu_schedule.read_schedule(dump, "other")


@pytest.mark.parametrize("causal", [False, True])
def test_cost_follows_active_blocks(causal):
    """Heads from 10% to 90% cost what equal heads with as many blocks cost: steps without work cost nothing."""
    unequal, uniform = tpu_schedule.masks_like_hads(causal)
    assert unequal.sum() == uniform.sum()
    row = {
        "tiling": {"wide": 2, "narrow": 1},
        "areas": [2 * 512 * 512, 512 * 512],
        "loops": [{"inner": 1200.0, "loop": 1250.0}, {"inner": 1400.0, "loop": 1450.0}],
        "step": 700,
    }
    cost, even = (tpu_schedule.ours_in_all(m, causal, row) for m in (unequal, uniform))
    assert cost["plain"] <= 1.1 * even["plain"]
    assert cost["strict"] <= 1.1 * even["strict"]
