"""One call under NVIDIA's compute-sanitizer, and the counts in the tool's summary."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence

from benchmarks.harness.script import Row

LIMIT = 600  # seconds
OURS = {"mosaic": "mosaic", "HADS": "hads"}  # a part of a call's name, and of the names of the kernels that are watched


def sanitize(name: str, tool: str, run: Sequence[str]) -> Row:
    """The row of one call and tool; `run`: the command that makes the call."""
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "3"]
    command += [
        word for of, kernel in OURS.items() if of in name for word in ("--kernel-name", f"kernel_substring={kernel}")
    ]
    # Each array is an allocation of its own, so that an access past its end is out of bounds.
    environment = os.environ | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run([*command, *run], capture_output=True, text=True, env=environment, timeout=LIMIT)
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
