"""Hardware counters of the Hopper kernels, forward and backward, beside FlashAttention-4: what the chip is busy with.

python -m benchmarks.gpu.profile             print (needs Nsight Compute's `ncu`)
python -m benchmarks.gpu.profile --record    also write benchmarks/results/gpu_profile.json
python -m benchmarks.gpu.profile --out DIR   write the run to DIR
python -m benchmarks.gpu.profile --who xsake only our own kernels

Counters are read with cold caches and without fixing the clock; compare shares, not times. The gradient of a call is
profiled, which runs its forward too. FlashAttention-4 runs where it is installed (benchmarks/README.md says how), on
the calls for which it has a masked backward that stays inside its memory.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import subprocess
import sys

import jax

from benchmarks.harness.script import Record, Row, listed, parser
from xsake.autotune.workloads import WORKLOADS

PROFILED = [  # workload, density, blocks
    *((name, density, 128) for name in ("gpt4k", "gpt4k_d64") for density in (1.0, 0.25, 0.1)),
    *(("full16k", density, 128) for density in (1.0, 0.43, 0.1)),
    *(("full16k", density, 64) for density in (0.43, 0.1)),
]
KERNELS = {"xsake": "mosaic", "fa4": "flash"}  # part of the kernels' names
LIMIT = 280  # seconds
METRICS = {
    "microseconds": "gpu__time_duration.sum",
    "tensor_core_share": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "dram_share": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_share": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hit_rate": "lts__t_sector_hit_rate.pct",
    "dram_read_bytes": "dram__bytes_read.sum",
    "l2_to_sm_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "issue_slots_share": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "shared_memory_share": "l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed",
    "exponential_share": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    **{
        f"stalled_{why}": f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio"
        for why in ("barrier", "long_scoreboard", "short_scoreboard", "gmma", "wait", "math_pipe_throttle")
    },
}


def run_all(who: str) -> None:
    """Runs each call once, for the profiler."""
    from xsake._race.contestants import sparse
    from xsake._race.course import BOTH, Course

    for name, density, block in profiled(who):
        workload = dataclasses.replace(WORKLOADS[name], block=block)
        course, mask = Course(workload, BOTH, calls=1), workload.mask(density)
        if who == "xsake":
            jax.block_until_ready(course.contestant(sparse, mask)())
        else:
            from xsake._race.peers import by_torch, fa4

            by_torch.wait(fa4.contestant(course, mask)())


def profiled(who: str) -> list[tuple[str, float, int]]:
    if who == "xsake":
        return PROFILED
    return [call for call in PROFILED if call[2] == 128 and (call[0] == "full16k" or call[1] < 1.0)]


def profile(who: str) -> list[Row]:
    # In base units, so that no prefix has to be parsed.
    command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["-k", f"regex:{KERNELS[who]}", "--metrics", ",".join(METRICS.values())]
    command += [sys.executable, "-m", "benchmarks.gpu.profile", "--run", who]
    # The profiler saves every allocation that a kernel may write to, for every pass: give each array its own.
    environment = os.environ | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT)
    except subprocess.TimeoutExpired as late:
        raise SystemExit(f"ncu was not done after {LIMIT} s:\n{(late.stdout or b'').decode()[-2000:]}") from None
    if done.returncode:
        raise SystemExit(f"ncu failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return read(who, done.stdout)


def read(who: str, printed: str) -> list[Row]:
    """A row per kernel, from what `ncu` printed; a call begins with its forward."""
    table = [line for line in printed.splitlines() if line.startswith('"')]
    header, _units, *rows = csv.reader(io.StringIO("\n".join(table)))
    found = [dict(zip(header, row, strict=True)) for row in rows]
    starts = [i for i, values in enumerate(found) if is_forward(who, values["Kernel Name"])]
    calls = profiled(who)
    if len(starts) != len(calls) or starts[:1] != [0]:
        names = sorted({values["Kernel Name"] for values in found})
        raise SystemExit(f"{len(starts)} forwards were profiled, {len(calls)} are expected; kernels: {names}")
    results = []
    for (name, density, block), begin, end in zip(calls, starts, [*starts[1:], len(found)], strict=True):
        for values in found[begin:end]:
            numbers = {key: _number(values[metric]) for key, metric in METRICS.items() if values.get(metric)}
            numbers["microseconds"] /= 1e3  # the base unit is a nanosecond
            about = {"implementation": who, "workload": name, "asked": density, "block": block}
            direction = "forward" if values is found[begin] else "backward"
            results.append({**about, "direction": direction, "kernel": values["Kernel Name"], **numbers})
    return results


def is_forward(who: str, kernel: str) -> bool:
    return "entry" in kernel if who == "xsake" else "fwd" in kernel.lower() or "forward" in kernel.lower()


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def line_of(r: Row) -> str:
    where = f"{r['implementation']:6} {r['workload']:10} {r['asked']:4.0%} block {r['block']:3} {r['direction']:8}"
    times = f"{r['microseconds']:8.1f} us  tensor cores {r['tensor_core_share']:3.0f}%  DRAM {r['dram_share']:3.0f}%"
    l2 = f"L2 {r['l2_share']:3.0f}% (hits {r['l2_hit_rate']:3.0f}%)"
    shared = f"shared memory {r.get('shared_memory_share', float('nan')):3.0f}%"
    stalls = "  ".join(f"{key[8:]} {r[key]:.2f}" for key in r if key.startswith("stalled_"))
    return f"{where} {times}  {l2}  {shared}  stalls: {stalls}  {r['kernel'][:40]}"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--who", type=listed(among=KERNELS), default=[*KERNELS], help="whose kernels")
    options.add_argument("--run", choices=KERNELS, help="run the calls themselves (for ncu)")
    args = options.parse_args()
    if args.run:
        return run_all(args.run)
    rows = Record("gpu_profile", args.out)
    for who in args.who:
        rows.add(*profile(who))
    print(*map(line_of, rows), sep="\n")


if __name__ == "__main__":
    main()
