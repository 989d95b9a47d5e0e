"""The smallest complete backend: dense attention, a few queries at a time. With every argument but `page_table`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from xsake.backend import Call, check_fields, whole

CONTRACT = 1  # the version of xsake.backend that this is written for
HONOURS = frozenset(
    {"bias", "q_segments", "kv_segments", "q_positions", "kv_positions", "sink_lse", "band", "soft_cap", "bitmaps"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Queries:
    """How many queries are computed at a time."""

    at_a_time: int = whole(1, 4096)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A field for each direction that is tuned by itself: here the forward alone."""

    forward: Queries

    def __post_init__(self) -> None:
        check_fields(self)


def unavailable() -> str | None:
    return None


def unsupported(call: Call) -> str | None:
    return None if call.kv_len <= 65536 else f"key has {call.kv_len} tokens, and at most 65536 are supported"


def default_blocks(q_len: int, kv_len: int, head_dim: int) -> tuple[int, int]:
    return 128, 128


def default_config(call: Call) -> Config:
    return Config(forward=Queries(at_a_time=64))


def search_space(call: Call) -> Sequence[Config]:
    return [Config(forward=Queries(at_a_time=n)) for n in (64, 16, 256)]  # the default is among them


def misfit(call: Call, config: Config) -> str | None:
    return None


def forward(call: Call, config: Config) -> tuple[Array, Array]:
    value = _per_query_head(call, call.value)

    def one_query(t: Array) -> tuple[Array, Array]:
        logits, _ = _logits(call, t)
        peak = logits.max(-1) if call.sink_lse is None else jnp.maximum(logits.max(-1), call.sink_lse)
        peak = jnp.where(peak == -jnp.inf, 0.0, peak)
        weights = jnp.exp(logits - peak[..., None])
        total = weights.sum(-1) + (0.0 if call.sink_lse is None else jnp.exp(call.sink_lse - peak))
        out = jnp.einsum("bhs,bshd->bhd", weights, value) / jnp.where(total == 0, 1.0, total)[..., None]
        return out, peak + jnp.log(total)  # a query that attends nothing: 0, and lse -inf

    out, lse = lax.map(one_query, jnp.arange(call.q_len), batch_size=config.forward.at_a_time)
    return out.swapaxes(0, 1).astype(call.query.dtype), jnp.moveaxis(lse, 0, 2)


def backward(
    call: Call, config: Config, lse: Array, delta: Array, d_out: Array, *, with_bias: bool
) -> tuple[Array, Array, Array, Array | None]:
    query, d_out = call.query.astype(jnp.float32), d_out.astype(jnp.float32)
    key, value = _per_query_head(call, call.key), _per_query_head(call, call.value)
    logits, slope = jax.vmap(partial(_logits, call), out_axes=2)(jnp.arange(call.q_len))
    weights = jnp.exp(logits - jnp.where(lse == -jnp.inf, 0.0, lse)[..., None])
    d_logits = weights * (jnp.einsum("bthd,bshd->bhts", d_out, value) - delta[..., None]) * slope
    d_query = jnp.einsum("bhts,bshd->bthd", d_logits, key) * call.scale
    d_key = _sum_of_groups(call, jnp.einsum("bhts,bthd->bshd", d_logits, query)) * call.scale
    d_value = _sum_of_groups(call, jnp.einsum("bhts,bthd->bshd", weights, d_out))
    dtype = call.query.dtype
    return d_query.astype(dtype), d_key.astype(dtype), d_value.astype(dtype), None  # the operation derives the bias


def _logits(call: Call, t: Array) -> tuple[Array, Array]:
    """Query t's logits [B, H, S], -inf where it does not attend, and the slope of the soft cap, 0 there."""
    x = jnp.einsum("bhd,bshd->bhs", call.query[:, t].astype(jnp.float32), _per_query_head(call, call.key)) * call.scale
    if call.bias is not None:
        x = x + call.bias[:, :, jnp.minimum(t, call.bias.shape[2] - 1)].astype(jnp.float32)
    slope = jnp.ones_like(x)
    if call.soft_cap is not None:
        capped = jnp.tanh(x / call.soft_cap)
        x, slope = call.soft_cap * capped, 1 - capped * capped
    attends = _attends(call, t)
    return jnp.where(attends, x, -jnp.inf), jnp.where(attends, slope, 0.0)


def _attends(call: Call, t: Array) -> Array:
    """bool[B or 1, H, S]: the mask lists the element, the rule holds, the segments agree."""
    mask, s = call.mask, jnp.arange(call.kv_len)
    attends = jnp.repeat(mask.to_listed()[:, :, t], call.q_heads // mask.heads, 1)
    q_position = t[None] if call.q_positions is None else call.q_positions[:, t]
    kv_position = s[None] if call.kv_positions is None else call.kv_positions
    # Their difference could wrap: positions may be any int32.
    attends &= call.band.allows_position(q_position[:, None, None], kv_position[..., None, :])
    if call.q_segments is not None and call.kv_segments is not None:
        attends &= (call.kv_segments == call.q_segments[:, t, None])[:, None]
    return attends


def _per_query_head(call: Call, x: Array) -> Array:
    """[B, S, K, D] as float32[B, S, H, D]."""
    return jnp.repeat(x.astype(jnp.float32), call.q_heads // call.kv_heads, 2)


def _sum_of_groups(call: Call, x: Array) -> Array:
    """[B, S, H, D] to [B, S, K, D]: query heads that share a KV head add their gradients."""
    b, s, _, d = x.shape
    return x.reshape(b, s, call.kv_heads, -1, d).sum(3)
