"""Regression gates: the time of a call over that of a reference in the same run, against the ratio of a recorded run.

    python -m benchmarks.gate             measure and compare
    python -m benchmarks.gate --record    measure and write benchmarks/results/gates_<device>.json

A machine's own speed is in both times, and cancels. `make bench` runs the same gates under pytest.

A case ends in one of three ways: it is as fast as recorded, it is slower, or the machine is busy and there is no
verdict (src/xsake/_race/verdict.py). The exit code is 1 if a case is slower, otherwise 3 if one has no verdict.
"""

import sys

from benchmarks.harness.gates import check_all, record_all

if __name__ == "__main__":
    sys.exit(record_all() if "--record" in sys.argv else check_all())
