"""The GPU kernels under NVIDIA's compute-sanitizer: reads and writes out of bounds, and races in shared memory.

python -m benchmarks.gpu.sanitize             print (needs `compute-sanitizer`)
python -m benchmarks.gpu.sanitize --record    also write benchmarks/results/gpu_sanitize.json
python -m benchmarks.gpu.sanitize --out DIR   write the run to DIR

Every call of `gpu/sanitized_calls.py` runs once in a process of its own; the record is written as they end. Races are
looked for only in the Mosaic kernels: in Triton's, the compiler places the barriers. A call that fails or takes too
long is recorded with the reason.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

from benchmarks.gpu.sanitized_calls import CALLS
from benchmarks.harness.sanitizer import sanitize
from benchmarks.harness.script import Record, Row, parser

TOOLS = ("memcheck", "racecheck")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--processes", type=int, help="at a time; by default by the number of cores")
    options.add_argument("--run", choices=CALLS, help="run a call itself (for compute-sanitizer)")
    args = options.parse_args()
    if args.run:
        return CALLS[args.run]()
    work = [(name, tool) for name in CALLS for tool in TOOLS if tool == "memcheck" or "mosaic" in name]
    found: dict[tuple[str, str], Row] = {}
    rows = Record("gpu_sanitize", args.out)
    with ThreadPoolExecutor(args.processes) as pool:
        run = [sys.executable, "-m", "benchmarks.gpu.sanitize", "--run"]
        waiting = {pool.submit(sanitize, *one, [*run, one[0]]): one for one in work}
        for done in as_completed(waiting):
            row = found[waiting[done]] = done.result()
            print(f"{row['case']:40} {row['tool']:10} {row.get('why') or str(row['errors']) + ' errors'}", flush=True)
            rows[:] = [found[one] for one in work if one in found]
            rows.save()
    sys.exit(any(r["errors"] != 0 for r in rows))


if __name__ == "__main__":
    main()
