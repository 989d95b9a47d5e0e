"""The Pallas-Mosaic backend for TPU: forward, dQ and dK/dV kernels that walk the mask's lists."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from xsake.backend.contract import Call
from xsake.kernels_pallas_tpu.config import Config, Tiling, default_config, misfit, search_space
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

    out, lse = kernel_forward.forward(_arithmetic(call.within_reach()), config.forward)
    return out.astype(call.query.dtype), lse


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

    wide = _arithmetic(call)
    rest = (lse, delta, d_out.astype(wide.query.dtype))
    dq = kernel_dq.dq(wide, config.dq, *rest)
    dk, dv = kernel_dkv.dkv(wide, config.dkv, *rest)
    # Its loop knows no bitmaps: the operation then computes this gradient.
    d_bias = bias_gradient(wide, *rest) if with_bias and call.mask.bitmaps is None else None
    return dq.astype(call.query.dtype), dk.astype(call.key.dtype), dv.astype(call.value.dtype), d_bias


def _arithmetic(call: Call) -> Call:
    """The call in a type that TPUs have: float32 in place of float16."""
    if call.query.dtype != jnp.float16:
        return call
    query, key, value = (x.astype(jnp.float32) for x in (call.query, call.key, call.value))
    return dataclasses.replace(call, query=query, key=key, value=value)
