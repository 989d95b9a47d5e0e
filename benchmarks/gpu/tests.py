"""The tests that need a GPU, as a record: what passed, failed and was skipped, at which commit, on which device.

python -m benchmarks.gpu.tests --record           run `pytest -m gpu`, write benchmarks/results/gpu_tests.json
python -m benchmarks.gpu.tests -n 7 --out DIR     the same in seven processes; the record goes to DIR
python -m benchmarks.gpu.tests -k pages --out DIR a part of the tests; all other options are pytest's too

The record is written after every test, so that a run that is cut off loses nothing. The next run with a record of the
same commit, device and versions leaves out the tests that passed, and adds what it finds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.outcomes import ROOT, run  # which imports no jax: tests/conftest.py must set its flags first


def _environment(arguments: Sequence[str]) -> dict[str, Any]:
    """Asked in a process of its own, which gives the GPU's memory back."""
    ask = "import json; from benchmarks import record; print(json.dumps(record.environment()))"
    done = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the device could not be asked for its name:\n{done.stderr[-2000:]}")
    words = (Path(word).name if os.path.isabs(word) else word for word in arguments)
    return json.loads(done.stdout.splitlines()[-1]) | {"command": " ".join(["benchmarks/gpu/tests.py", *words])}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--record", action="store_true", help="write to benchmarks/results")
    where.add_argument("--out", type=Path, metavar="DIR", help="write to another folder")
    parser.add_argument("-m", dest="marker", default="gpu", help="the tests, by pytest's markers; gpu by default")
    args, of_pytest = parser.parse_known_args(arguments)
    folder = (args.out or ROOT / "benchmarks" / "results").resolve()
    return run(_environment(arguments), folder / "gpu_tests.json", args.marker, of_pytest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
