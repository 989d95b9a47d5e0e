"""Errors of output and gradients against float64: ours and cuDNN's, dense causal, in one run.

python -m benchmarks.gpu.accuracy --out DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import xsake
from benchmarks import record

NAMES = ("output", "d_query", "d_key", "d_value")


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, d_out: np.ndarray) -> tuple[np.ndarray, ...]:
    q, k, v, d_out = (np.asarray(x).astype(np.float64).swapaxes(1, 2) for x in (q, k, v, d_out))
    scale, length = q.shape[-1] ** -0.5, q.shape[2]
    x = np.where(np.tri(length, dtype=bool), q @ k.swapaxes(-1, -2) * scale, -np.inf)
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = p @ v
    dx = p * (d_out @ v.swapaxes(-1, -2) - (d_out * out).sum(-1, keepdims=True)) * scale
    grads = (dx @ k, dx.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ d_out)
    return tuple(y.swapaxes(1, 2) for y in (out, *grads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    results = []
    for dtype in (jnp.bfloat16, jnp.float16):
        for head_dim in (64, 128):
            keys = jax.random.split(jax.random.key(head_dim), 4)
            q, k, v, d_out = (jax.random.normal(key, (1, 1024, 4, head_dim), jnp.float32).astype(dtype) for key in keys)
            truth = exact(q, k, v, d_out)
            attends = {
                "xsake": lambda *x: xsake.attention(*x, is_causal=True),
                "cudnn": lambda *x: jax.nn.dot_product_attention(*x, is_causal=True, implementation="cudnn"),
            }
            for who, attend in attends.items():
                out, pull = jax.vjp(jax.jit(attend), q, k, v)
                for name, got, want in zip(NAMES, (out, *pull(d_out)), truth, strict=True):
                    error = np.asarray(got).astype(np.float64) - want
                    rms = float(np.sqrt(np.mean(error**2) / np.mean(want**2)))
                    entry = {"dtype": jnp.dtype(dtype).name, "head_dim": head_dim, "implementation": who}
                    results.append(entry | {"of": name, "rms": rms, "max": float(np.abs(error).max())})
    for ours, peer in zip(*([r for r in results if r["implementation"] == w] for w in ("xsake", "cudnn")), strict=True):
        print(ours["dtype"], ours["head_dim"], ours["of"], f"{ours['rms']:.2e} {peer['rms']:.2e}", end=" ")
        print(f"rms {ours['rms'] / peer['rms']:.2f} max {ours['max'] / peer['max']:.2f}")
    record.save("gpu_accuracy", results, args.out)


if __name__ == "__main__":
    main()
