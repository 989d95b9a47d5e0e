"""The GPU kernels under NVIDIA's compute-sanitizer: reads and writes out of bounds, and races in shared memory.

python -m benchmarks.gpu.sanitize             print (needs `compute-sanitizer`)
python -m benchmarks.gpu.sanitize --record    also write benchmarks/results/gpu_sanitize.json
python -m benchmarks.gpu.sanitize --out DIR   write the run to DIR

Every call of `gpu/sanitized_calls.py` runs once in a process of its own; the record is written as they end. Races are
looked for only in the Mosaic kernels: in Triton's, the compiler places the barriers. A call that fails or takes too
long is recorded with the reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

from benchmarks.gpu.sanitized_calls import CALLS
from benchmarks.harness.script import Record, Row, parser

TOOLS = ("memcheck", "racecheck")
LIMIT = 600  # seconds
OURS = {"mosaic": "mosaic", "HADS": "hads"}  # a part of a call's name, and of the names of the kernels that are watched


def sanitize(name: str, tool: str) -> Row:
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "3"]
    command += [
        word for of, kernel in OURS.items() if of in name for word in ("--kernel-name", f"kernel_substring={kernel}")
    ]
    command += [sys.executable, "-m", "benchmarks.gpu.sanitize", "--run", name]
    # Each array is an allocation of its own, so that an access past its end is out of bounds.
    environment = os.environ | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"case": name, "tool": tool, "errors": None, "why": f"not done after {LIMIT} s"}
    said = done.stdout + done.stderr
    errors = errors_in(said, done.returncode)
    row: Row = {"case": name, "tool": tool, "errors": errors}
    if errors is None:
        row["why"] = f"failed with exit code {done.returncode}: {said[-1000:]}"
    if warnings := warnings_in(said):
        row["warnings"] = warnings
    if errors or warnings:
        row["said"] = said[:4000]
    return row


def errors_in(said: str, code: int = 0) -> int | None:
    """The number of errors that the sanitizer counted; None if it gives no number, or if the program failed."""
    counts = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: .*\((\d+) error)", said)
    if not counts or (code and not any(int(a or b) for a, b in counts)):
        return None
    return sum(int(a or b) for a, b in counts)


def warnings_in(said: str) -> int:
    return sum(map(int, re.findall(r"RACECHECK SUMMARY: .*, (\d+) warning", said)))


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
        waiting = {pool.submit(sanitize, *one): one for one in work}
        for done in as_completed(waiting):
            row = found[waiting[done]] = done.result()
            print(f"{row['case']:40} {row['tool']:10} {row.get('why') or str(row['errors']) + ' errors'}", flush=True)
            rows[:] = [found[one] for one in work if one in found]
            rows.save()
    sys.exit(any(r["errors"] != 0 for r in rows))


if __name__ == "__main__":
    main()
