"""The project's own gates: `xsake gate` over the shared workloads.

    python -m benchmarks.gate             compare with the baseline of this machine; without one, record it
    python -m benchmarks.gate --record    record a new baseline

`make bench` is this. Baselines are in .benchmarks, in pytest-benchmark's storage. The exit codes are those of
`xsake gate`: 1 if a call is slower or fails, 3 if there is no verdict on one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import record
from xsake._cli import app
from xsake._measure.isolation import Worker
from xsake._race import gate
from xsake._race.gate import GateService
from xsake.autotune.problem import DEFAULT_SETS
from xsake.autotune.workloads import WORKLOADS

STORAGE = record.ROOT / ".benchmarks" / "make_bench"  # apart from what a reader of the pages records
DENSITIES = (0.43, 0.1)


def words(storage: Path, platform: str, device: str, *, record_anew: bool) -> list[str]:
    """The words of `xsake gate` on this machine."""
    given = ["gate", "--storage", str(storage)]
    if not record_anew and _has_baseline(storage, device):
        return given
    workloads, *_ = DEFAULT_SETS.get(platform, DEFAULT_SETS["cpu"])
    shapes = [f"{WORKLOADS[name].shape},density={density:g}" for name in workloads for density in DENSITIES]
    return [*given, "--record", "--gradients", *(word for shape in shapes for word in ("--shape", shape))]


def _has_baseline(storage: Path, device: str) -> bool:
    try:
        gate.baseline(storage, device)
    except ValueError:
        return False
    return True


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--record", action="store_true", help="record a new baseline")
    args = options.parse_args()
    worker = Worker(GateService)
    try:
        facts = worker.call("facts", limit=60.0)
    finally:
        worker.close()
    app(words(STORAGE, facts.platform, facts.device_kind, record_anew=args.record))


if __name__ == "__main__":
    main()
