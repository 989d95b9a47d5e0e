"""Hardware counters of the Hopper forward: what the kernel waits for on short sequences and at low density.

python -m benchmarks.gpu_profile             print (needs Nsight Compute's `ncu`)
python -m benchmarks.gpu_profile --record    also write benchmarks/results/gpu_profile.json
python -m benchmarks.gpu_profile --out DIR   write the run to DIR

Counters are read with cold caches and without fixing the clock; compare shares, not times.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import record
from xsake.autotune.workloads import WORKLOADS

PROFILED = [(name, density) for name in ("gpt4k", "gpt4k_d64", "full16k") for density in (1.0, 0.25, 0.1)]
LIMIT = 100  # seconds
METRICS = {
    "microseconds": "gpu__time_duration.sum",
    "tensor_core_share": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "dram_share": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_share": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hit_rate": "lts__t_sector_hit_rate.pct",
    "dram_read_bytes": "dram__bytes_read.sum",
    "l2_to_sm_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "issue_slots_share": "sm__inst_issued.avg.pct_of_peak_sustained_active",
}


def run_all() -> None:
    """Run each call once, for the profiler."""
    import jax
    import jax.numpy as jnp

    import xsake

    for name, density in PROFILED:
        workload = WORKLOADS[name]
        attend = jax.jit(lambda q, k, v, mask: xsake.attention(q, k, v, mask, implementation="mosaic_gpu"))
        jax.block_until_ready(attend(*workload.inputs(jnp.bfloat16), workload.mask(density)))


def profile() -> list[dict[str, Any]]:
    # In base units, so that no prefix has to be parsed.
    command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["-k", "regex:mosaic", "--metrics", ",".join(METRICS.values())]
    command += [sys.executable, "-m", "benchmarks.gpu_profile", "--run"]
    # The profiler saves every allocation that a kernel may write to, for every pass: give each array its own.
    environment = os.environ | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT)
    except subprocess.TimeoutExpired as late:
        raise SystemExit(f"ncu was not done after {LIMIT} s:\n{(late.stdout or b'').decode()[-2000:]}") from None
    if done.returncode:
        raise SystemExit(f"ncu failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    table = [line for line in done.stdout.splitlines() if line.startswith('"')]
    header, _units, *rows = csv.reader(io.StringIO("\n".join(table)))
    if len(rows) != len(PROFILED):
        raise SystemExit(f"{len(rows)} kernels were profiled, {len(PROFILED)} are expected")
    results = []
    for (name, density), row in zip(PROFILED, rows, strict=True):
        values = dict(zip(header, row, strict=True))
        numbers = {key: float(values[metric].replace(",", "")) for key, metric in METRICS.items()}
        numbers["microseconds"] /= 1e3  # the base unit is a nanosecond
        results.append({"workload": name, "asked": density, **numbers})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--run", action="store_true", help="run the calls themselves (for ncu)")
    args = parser.parse_args()
    if args.run:
        return run_all()
    results = profile()
    for r in results:
        where = f"{r['workload']:10} {r['asked']:4.0%} {r['microseconds']:8.1f} us"
        l2 = f"L2 {r['l2_share']:3.0f}% (hits {r['l2_hit_rate']:3.0f}%)"
        print(f"{where}  tensor cores {r['tensor_core_share']:3.0f}%  DRAM {r['dram_share']:3.0f}%  {l2}")
    if out := record.RESULTS if args.record else args.out:
        record.save("gpu_profile", results, out)


if __name__ == "__main__":
    main()
