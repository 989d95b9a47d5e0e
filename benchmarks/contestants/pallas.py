"""JAX's own dense attention kernels in Pallas as contestants: forward, with no mask but causality.

The kernel for Hopper gets float16: jax 0.11 refuses to compile it with bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.gpu import attention as triton
from jax.experimental.pallas.ops.gpu import attention_mgpu as mosaic

from xsake.autotune.workloads import Workload


def contestants(workload: Workload) -> dict[str, tuple[Callable[[Array, Array, Array], Array], Any]]:
    """{name: (function, dtype of its arguments)}."""
    scale = workload.head_dim**-0.5
    group = workload.q_heads // workload.kv_heads
    tiles = mosaic.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=workload.is_causal)

    def pallas_mosaic(q: Array, k: Array, v: Array) -> Array:
        return mosaic.attention(q, k, v, tiles)  # the kernel takes no scale: callers scale the query

    def pallas_triton(q: Array, k: Array, v: Array) -> Array:
        k, v = (jnp.repeat(x, group, axis=2) if group > 1 else x for x in (k, v))  # the kernel has no grouped heads
        blocks = triton.BlockSizes(block_q=128, block_k=64)
        return triton.mha(q, k, v, None, sm_scale=scale, causal=workload.is_causal, block_sizes=blocks)

    return {"pallas mosaic": (pallas_mosaic, jnp.float16), "pallas triton": (pallas_triton, jnp.bfloat16)}
