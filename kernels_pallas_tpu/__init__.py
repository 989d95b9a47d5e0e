"""The Pallas-Mosaic backend for TPU: forward, dQ and dK/dV kernels that walk the mask's lists."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from xsake._rewrites import rewrite
from xsake._rewrites.reach import Reach
from xsake.backend.contract import Call
from xsake.kernels_pallas_tpu.config import Config, Tiling, default_config, misfit, search_space
from xsake.kernels_pallas_tpu.float32 import Float32
from xsake.kernels_pallas_tpu.tile import pages

__all__ = [
    "HONOURS",
    "Config",
    "Tiling",
    "backward",
    "default_blocks",
    "default_config",
    "forward",
    "misfit",
    "search_space",
    "unavailable",
    "unsupported",
]

HONOURS = frozenset(
    {
        "bias",
        "q_segments",
        "kv_segments",
        "q_positions",
        "kv_positions",
        "sink_lse",
        "band",
        "soft_cap",
        "bitmaps",
        "page_table",
        "joined_kv",
    }
)


def unavailable() -> str | None:
    return None


def unsupported(call: Call) -> str | None:
    if call.query.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"query.dtype={call.query.dtype} has no TPU arithmetic; use bfloat16, float16 or float32"
    return None if call.page is None else pages.unsupported(call)


def default_blocks(q_len: int, kv_len: int, head_dim: int) -> tuple[int, int]:
    return 512, 512


def forward(call: Call, config: Config) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B H T"]]:
    from xsake.kernels_pallas_tpu import kernel_forward

    run = partial(kernel_forward.forward, tiling=config.forward)
    return rewrite.forward((Reach.of, Float32.of), call, run)


def backward(
    call: Call,
    config: Config,
    lse: Float[Array, "B H T"],
    delta: Float[Array, "B H T"],
    d_out: Float[Array, "B T H Dv"],
    *,
    with_bias: bool,
) -> tuple[Array, Array, Array, Array | None]:
    from xsake.kernels_pallas_tpu import kernel_dkv, kernel_dq
    from xsake.kernels_pallas_tpu.bias_gradient import bias_gradient

    def run(call: Call, *given: Array) -> tuple[Array, Array, Array, Array | None]:
        dq = kernel_dq.dq(call, config.dq, *given)
        dk, dv = kernel_dkv.dkv(call, config.dkv, *given)
        # Its loop knows no bitmaps: the operation then computes this gradient.
        return dq, dk, dv, bias_gradient(call, *given) if with_bias and call.mask.bitmaps is None else None

    return rewrite.backward((Float32.of,), call, (lse, delta, d_out), run)
