"""The GPU kernels under NVIDIA's compute-sanitizer: reads and writes out of bounds, and races in shared memory.

python -m benchmarks.gpu_sanitize             print (needs `compute-sanitizer`)
python -m benchmarks.gpu_sanitize --record    also write benchmarks/results/gpu_sanitize.json
python -m benchmarks.gpu_sanitize --out DIR   write the run to DIR

Every case runs forward and backward once in a process of its own. Races are looked for only in the Mosaic
kernels: in Triton's, the compiler places the barriers.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import record

# Sequences are long enough for more tiles than there are SMs, so that the persistent kernel runs.
CASES: dict[str, dict[str, Any]] = {
    "mosaic_gpu, block 128": dict(implementation="mosaic_gpu", block=128, head_dim=128),
    "mosaic_gpu, block 64, a mask a head": dict(implementation="mosaic_gpu", block=64, head_dim=64),
    "mosaic_gpu, segments and sinks": dict(implementation="mosaic_gpu", block=128, head_dim=64, options=True),
    "triton, float32": dict(implementation="triton", block=64, head_dim=64, dtype="float32"),
    "triton, bfloat16": dict(implementation="triton", block=64, head_dim=128),
}
TOOLS = ("memcheck", "racecheck")
LIMIT = 120  # seconds


def run(
    *,
    implementation: str,
    block: int,
    head_dim: int,
    dtype: str = "bfloat16",
    options: bool = False,
    length: int = 2048,
) -> None:
    """Run one case forward and backward, for the sanitizer."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import xsake

    heads, side = 16, length // block
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, d_out = (jax.random.normal(key, (1, length, heads, head_dim), dtype) for key in keys)
    blocks = np.random.default_rng(0).random((heads, side, side)) < 0.3
    mask = xsake.BlockMask.from_blocks(
        blocks | np.eye(side, dtype=bool), block_q=block, block_kv=block, q_len=length, kv_len=length, is_causal=True
    )
    more: dict[str, Any] = {}
    if options:
        more = {"segment_ids": jnp.arange(length)[None] // 700, "sinks": jnp.linspace(-1.0, 1.0, heads)}
    out, pull = jax.vjp(lambda *x: xsake.attention(*x, mask, implementation=implementation, **more), q, k, v)
    jax.block_until_ready(pull(d_out))
    assert bool(jnp.isfinite(out.astype(jnp.float32)).all())


def sanitize(name: str, tool: str) -> dict[str, Any]:
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "3"]
    if "mosaic" in name:
        command += ["--kernel-name", "kernel_substring=mosaic"]
    command += [sys.executable, "-m", "benchmarks.gpu_sanitize", "--run", name]
    # Each array is an allocation of its own, so that an access past its end is out of bounds.
    environment = os.environ | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{tool} of {name!r} was not done after {LIMIT} s") from None
    return {"case": name, "tool": tool, "errors": errors_in(done.stdout + done.stderr, done.returncode)}


def errors_in(said: str, code: int = 0) -> int:
    """The number of errors that the sanitizer counted; SystemExit if it gives no number, or if the program failed."""
    counts = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", said)
    if not counts or (code and not any(int(a or b) for a, b in counts)):
        raise SystemExit(f"the run failed with exit code {code}:\n{said[-3000:]}")
    return sum(int(a or b) for a, b in counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--run", choices=CASES, help="run a case itself (for compute-sanitizer)")
    args = parser.parse_args()
    if args.run:
        return run(**CASES[args.run])
    work = [(name, tool) for name in CASES for tool in TOOLS if tool == "memcheck" or "mosaic" in name]
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda one: sanitize(*one), work))
    for r in results:
        print(f"{r['case']:40} {r['tool']:10} {r['errors']} errors")
    if out := record.RESULTS if args.record else args.out:
        record.save("gpu_sanitize", results, out)
    sys.exit(any(r["errors"] for r in results))


if __name__ == "__main__":
    main()
