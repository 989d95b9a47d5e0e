"""JAX's reference in place of its kernel, which only a Hopper GPU runs: the same arguments and results, in float32."""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import attention_mgpu
from jax_mosaic import backend

LOG2E = 1 / backend.LN2


def attention(query, key, value, config, save_residuals):
    _check_tiles(query, key, config.block_kv)
    out, (lse,) = attention_mgpu.attention_reference(query, key, value, config.causal, save_residuals)
    return out.astype(query.dtype), (lse,)


def attention_bwd(config, save_residuals, residuals, d_out):
    """As the kernels compute: the weights from lse, and delta from the output."""
    query, key, value, out, lse = (x.astype(jnp.float32) for x in residuals)
    _check_tiles(query, key, config.block_kv_dq)
    assert not config.causal
    d_out, group = d_out.astype(jnp.float32), query.shape[2] // key.shape[2]
    keys, values = jnp.repeat(key, group, 2), jnp.repeat(value, group, 2)
    weights = jnp.exp2(jnp.einsum("bthd,bshd->bhts", query, keys) * LOG2E - lse[..., None])
    delta = jnp.einsum("bthd,bthd->bht", out, d_out)
    d_logits = weights * (jnp.einsum("bthd,bshd->bhts", d_out, values) - delta[..., None])
    d_key = jnp.einsum("bhts,bthd->bshd", d_logits, query)
    d_value = jnp.einsum("bhts,bthd->bshd", weights, d_out)
    d_key, d_value = (x.reshape(*key.shape[:3], group, -1).sum(3) for x in (d_key, d_value))
    d_query = jnp.einsum("bhts,bshd->bthd", d_logits, keys)
    return tuple(x.astype(jnp.float16) for x in (d_query, d_key, d_value))


def _check_tiles(query, key, block_kv):
    assert query.shape[1] % 128 == key.shape[1] % block_kv == query.shape[3] % 64 == 0


def put_in_place():
    attention_mgpu.attention, attention_mgpu._attention_bwd = attention, attention_bwd
    backend.unavailable = lambda: None
