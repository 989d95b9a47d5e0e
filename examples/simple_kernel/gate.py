"""Is the kernel as fast as it was on this machine?

    python gate.py --record    measure the calls below, and keep them as the baseline, in .benchmarks
    python gate.py             measure them again; exits with 1 where one is surely slower

The package must be installed. "Keep it fast" in XSAKE's documentation says how calls are compared.
"""

from __future__ import annotations

import subprocess
import sys

SHAPES = ("1x4096x8x64,causal", "1x4096x8x64,causal,density=0.4")  # as in `xsake race`


def command(*, record: bool) -> list[str]:
    words = ["gate"]
    if record:
        words += ["--record", "--implementation", "simple_kernel"]
        words += [word for shape in SHAPES for word in ("--shape", shape)]
    return words


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--record"]):
        sys.exit("python gate.py [--record]")
    sys.exit(subprocess.call([sys.executable, "-m", "xsake", *command(record=bool(sys.argv[1:]))]))
