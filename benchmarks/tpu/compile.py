"""Compile every workload of xsake.kernels_pallas_tpu.ahead for every TPU, with default configurations, and record it.

    python-with-libtpu -m benchmarks.tpu.compile              compile and print
    python-with-libtpu -m benchmarks.tpu.compile --record     also write benchmarks/results/tpu_compile.json

Nothing is run: that a kernel compiles says that Mosaic accepts it and that it fits VMEM and SMEM.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from benchmarks import record
from benchmarks.harness.script import parser
from xsake.kernels_pallas_tpu import ahead


def compiled_for(topology: str) -> dict[str, Any]:
    start = time.time()
    outcomes = list(ahead.sweep(topology))
    failed = {f"{workload.name}, {kernel}": problem for workload, kernel, problem in outcomes if problem}
    return {
        "topology": topology,
        "compiled": len(outcomes) - len(failed),
        "failed": failed,
        "seconds": round(time.time() - start),
    }


def main() -> int:
    out = parser(__doc__).parse_args().out
    ahead.without_hardware()
    topologies = []
    for topology in ahead.TOPOLOGIES:
        topologies.append(compiled_for(topology))
        print(topologies[-1], flush=True)
    if out is not None:
        workloads = [
            {
                "name": w.name,
                "tokens": max(w.q_len, w.kv_len),
                "blocks": [w.block_q, w.block_kv],
                "paged": w.page is not None,
            }
            for w in ahead.WORKLOADS
        ]
        print(record.save("tpu_compile", {"workloads": workloads, "topologies": topologies}, out))
    return int(any(t["failed"] for t in topologies))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # libtpu's teardown can crash where there is no TPU, after all the work is done
