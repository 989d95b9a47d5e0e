"""Checks that the operations of this package share."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from xsake._op.arguments import check_inputs


def check_arrays(query: Any, key: Any, value: Any) -> tuple[Array, Array, Array]:
    """The three arrays; query and key have one length, since block numbers are of the query's own sequence."""
    check_inputs(query, key, value)
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query and key must have one length; got {query.shape[1]} and {key.shape[1]}. For a cache, make the mask "
            f"with BlockMask.from_token_indices(..., kv_len=) and pass it to xsake.attention with positions"
        )
    return jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)


def check_whole(name: str, value: Any, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} must be an int of at least {least}")
    return value


def check_gate(name: str, gate: Any, query: Array, value: Array) -> Array | None:
    """[B, T, H, 1 or Dv]."""
    if gate is None:
        return None
    gate = jnp.asarray(gate)
    if not jnp.issubdtype(gate.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got dtype {gate.dtype}")
    lead, channels = query.shape[:3], value.shape[3]
    if gate.shape == lead:
        return gate[..., None]
    if gate.shape not in ((*lead, 1), (*lead, channels)):
        raise ValueError(
            f"{name} must be [batch, tokens, heads]={list(lead)}, or have {channels} channels besides; got shape "
            f"{tuple(gate.shape)}"
        )
    return gate
