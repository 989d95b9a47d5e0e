"""Attention to keys and values in pages: `xsake.attention(..., page_table=...)`, forward only."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake import _registry
from xsake._arguments import build_call, check_inputs
from xsake.hads.mask.block_mask import BlockMask
from xsake.kernels_xla_ref import paged

# The options of a call that are known while tracing; the others are arrays, or trees of arrays.
_STATIC = ("scale", "is_causal", "local_window_size", "logits_soft_cap", "deterministic")


def attention(
    query: Any,
    key: Any,
    value: Any,
    mask: BlockMask | None,
    page_table: Any,
    *,
    implementation: str | None,
    config: Any,
    **options: Any,
) -> tuple[Array, Array]:
    """(output, lse [B, T, H]); the options are the arguments of `xsake.attention` that describe the call."""
    _registry.check_name(implementation)
    if implementation not in (None, "xla"):
        raise NotImplementedError(f"{implementation=} does not honour page_table; 'xla' does")
    if mask is not None and not isinstance(mask, BlockMask):
        raise TypeError(f"mask must be a BlockMask or None, got {type(mask).__name__}")
    for name in ("scale", "logits_soft_cap"):
        if not isinstance(options[name], int | float | np.number | None):
            raise TypeError(f"{name} must be a number known while tracing, got {options[name]!r}")
    query, key, value = _forward_only(tuple(jnp.asarray(x) for x in (query, key, value)))
    pages = paged.Pages(key, value, _check(query, key, value, page_table))
    wrong = _wrong_pages(pages, options["key_value_seq_lengths"])
    static = tuple((name, options.pop(name)) for name in _STATIC)
    out, lse = _run(static, config, query, pages, mask, options)
    if wrong is not None:
        out, lse = (jnp.where(wrong.reshape(-1, *(1,) * (x.ndim - 1)), jnp.nan, x) for x in (out, lse))
    return out, lse.swapaxes(1, 2)


# One program also outside jit, in which the arrays that stand for key and value do not exist.
@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _run(
    static: tuple[tuple[str, Any], ...],
    config: Any,
    query: Array,
    pages: paged.Pages,
    mask: BlockMask | None,
    arrays: dict[str, Any],
) -> tuple[Array, Array]:
    tokens = pages.table.shape[1] * pages.size
    key, value = (
        jnp.broadcast_to(jnp.zeros((), x.dtype), (len(pages.table), tokens, *x.shape[2:]))
        for x in (pages.key, pages.value)
    )
    check_inputs(query, key, value)
    backend = _registry.get("xla")
    described: dict[str, Any] = dict(static) | arrays
    described["default_blocks"] = backend.default_blocks(query.shape[1], tokens, query.shape[3])
    call = build_call(query, key, value, mask, **described)
    out, lse = paged.forward(call, _config(backend, call, config, pages.size), pages)
    if call.q_segments is not None:
        out = jnp.where((call.q_segments >= 0)[:, :, None, None], out, 0)
    return out, lse


def _config(backend: Any, call: Any, config: Any, page: int) -> Any:
    """A configuration whose tiles of keys lie within a page."""
    if config is None:
        default = backend.default_config(call)
        kv = math.gcd(default.forward.kv, page)
        return dataclasses.replace(default, forward=dataclasses.replace(default.forward, kv=kv))
    if not isinstance(config, backend.Config):
        raise TypeError(f"config must be a Config of implementation 'xla', got {type(config).__qualname__}")
    if page % config.forward.kv:
        raise ValueError(f"config: a tile of {config.forward.kv} keys must divide the page of {page} keys")
    return config


def _check(query: Array, key: Array, value: Array, page_table: Any) -> Array:
    for name, x in (("key", key), ("value", value)):
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(f"with page_table, {name} must be [pages, page, heads, head_dim]; got shape {x.shape}")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"key and value must have the same pages and heads; got shapes {key.shape} and {value.shape}")
    table = jnp.asarray(page_table)
    if not jnp.issubdtype(table.dtype, jnp.integer):
        raise TypeError(f"page_table must be integers, got dtype {table.dtype}")
    if table.ndim != 2 or table.shape[0] != query.shape[0] or table.shape[1] < 1:
        raise ValueError(
            f"page_table must be [batch, pages per sequence] with batch={query.shape[0]}; got shape {table.shape}"
        )
    return table.astype(jnp.int32)


def _wrong_pages(pages: paged.Pages, lengths: Any) -> Array | None:
    """bool[B]: a page that the sequence needs does not exist. ValueError where that is known, None where none is."""
    table = pages.table
    first = np.arange(table.shape[1]) * pages.size
    needed = first[None] < (np.array([[2**31 - 1]]) if lengths is None else jnp.asarray(lengths)[:, None])
    count = pages.key.shape[0]
    wrong = needed & ((table < 0) | (table >= count))
    if isinstance(wrong, jax.core.Tracer):
        return wrong.any(1)
    if (found := np.argwhere(np.asarray(wrong))).size:
        sequence, place = found[0].tolist()
        raise ValueError(
            f"page_table[{sequence}, {place}]={int(table[sequence, place])} must be a page from 0 to {count - 1}, the "
            f"pages of key and value; only entries at or past key_value_seq_lengths may be anything"
        )
    return None


@jax.custom_jvp
def _forward_only(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    return arrays


@_forward_only.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "attention with page_table is forward only: for gradients, give key and value as [B, S, K, D]"
    )
