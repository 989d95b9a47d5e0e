"""Errors of output and gradients against float64: ours and cuDNN's, dense causal, in one run.

python -m benchmarks.gpu.accuracy --record                         write benchmarks/results/gpu_accuracy.json
python -m benchmarks.gpu.accuracy --dense xla --dtypes bfloat16    a run anywhere
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xsake
from benchmarks.harness.script import Record, listed, parser, show
from xsake._race.contestants import dense
from xsake._race.course import BOTH, Course, in_direction
from xsake.autotune.workloads import Workload

NAMES = ("output", "d_query", "d_key", "d_value")


def exact(*given: Any) -> tuple[np.ndarray, ...]:
    """Output and gradients of query, key and value in float64, from these and the output's cotangent."""
    q, k, v, d_out = (np.asarray(x).astype(np.float64).swapaxes(1, 2) for x in given)
    scale, length = q.shape[-1] ** -0.5, q.shape[2]
    x = np.where(np.tri(length, dtype=bool), q @ k.swapaxes(-1, -2) * scale, -np.inf)
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = p @ v
    dx = p * (d_out @ v.swapaxes(-1, -2) - (d_out * out).sum(-1, keepdims=True)) * scale
    grads = (dx @ k, dx.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ d_out)
    return tuple(y.swapaxes(1, 2) for y in (out, *grads))


def main() -> None:
    options = parser(__doc__, dense=True)
    options.add_argument("--dtypes", type=listed(), default=["bfloat16", "float16"])
    args = options.parse_args()
    attends = {"xsake": partial(xsake.attention, is_causal=True), args.dense: dense(args.dense)}
    rows = Record("gpu_accuracy", args.out)
    for dtype in args.dtypes:
        for head_dim in (64, 128):
            sizes: dict[str, Any] = dict(batch=1, q_heads=4, kv_heads=4, length=1024, head_dim=head_dim)
            course = Course(Workload(name="accuracy", is_causal=True, **sizes), BOTH, jnp.dtype(dtype))
            truth = exact(*course.given)
            for who, attend in attends.items():
                found = jax.tree.leaves(jax.jit(in_direction(attend, BOTH))(*course.given))
                for name, got, want in zip(NAMES, found, truth, strict=True):
                    error = np.asarray(got).astype(np.float64) - want
                    rms = float(np.sqrt(np.mean(error**2) / np.mean(want**2)))
                    entry = {"dtype": dtype, "head_dim": head_dim, "implementation": who}
                    rows.add(entry | {"of": name, "rms": rms, "max": float(np.abs(error).max())})
    ours, peer = ([r for r in rows if r["implementation"] == who] for who in attends)
    show(
        ["dtype", "D", "result", "rms", f"rms of {args.dense}", "rms, ours over theirs", "largest, ours over theirs"],
        [
            [a["dtype"], a["head_dim"], a["of"], *(f"{x['rms']:.2e}" for x in (a, b))]
            + [f"{a[what] / b[what]:.2f}" for what in ("rms", "max")]
            for a, b in zip(ours, peer, strict=True)
        ],
    )


if __name__ == "__main__":
    main()
