"""Attention to keys and values in pages: `xsake.attention(..., page_table=...)`, forward only."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake._ground.device import on_host, platform_of
from xsake._ground.explicit import placed_like
from xsake._ground.programs import newest_programs
from xsake._ground.trace import vary, varying_axes
from xsake._op import registry
from xsake._op.arguments import build_call, check_inputs
from xsake._op.fold import mappable
from xsake._op.run import Runner
from xsake._rewrites import rewrite
from xsake._rewrites.held_blocks import HeldBlocks
from xsake.backend.contract import Call
from xsake.hads.mask.block_mask import BlockMask

_LEAST_BLOCK = 64  # a block of a dense call lies in one page where pages are so long; shorter ones make long lists


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
    floats = dict(query=query, key=key, value=value, bias=options["bias"], sinks=options["sinks"])
    floats = forward_only({name: jnp.asarray(x) for name, x in floats.items() if x is not None})
    query, key, value = (floats.pop(name) for name in ("query", "key", "value"))
    options |= floats
    table = _check(query, key, value, page_table)
    wrong = wrong_pages(table, key.shape, options["key_value_seq_lengths"])
    names = registry.candidates(implementation, platform_of(query))
    page = key.shape[1]
    blocks = blocks_in_pages(names[0], query.shape[1], table.shape[1] * page, query.shape[3], page)
    call = build_call(query, key, value, mask, page_table=table, default_blocks=blocks, **options)
    kinds = (HeldBlocks.of,) if mask is None and options["key_value_seq_lengths"] is not None else ()
    out, lse = rewrite.forward(kinds, call, partial(run, names, config))
    if call.q_segments is not None:
        out = jnp.where((call.q_segments >= 0)[:, :, None, None], out, 0)
    if wrong is not None:
        out, lse = (jnp.where(wrong.reshape(-1, *(1,) * (x.ndim - 1)), jnp.nan, x) for x in (out, lse))
    return placed_like(query, out), placed_like(query, lse.swapaxes(1, 2))


def blocks_in_pages(name: str, q_len: int, kv_len: int, head_dim: int, page: int) -> tuple[int, int]:
    """(block_q, block_kv) of a dense call."""
    block_q, block_kv = registry.get(name).default_blocks(q_len, kv_len, head_dim)
    return block_q, in_a_page if (in_a_page := math.gcd(block_kv, page)) >= _LEAST_BLOCK else block_kv


def run(names: list[str], config: Any, call: Call) -> tuple[Array, Array]:
    runner = Runner.of(names, call, config)
    out, lse = _mappable(runner)(vary(call, varying_axes(call)))
    return out, runner.contract_lse(lse)


@newest_programs
def _mappable(runner: Runner) -> Callable:
    return mappable(runner.forward)


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
    # The other checks are those of a call without pages.
    tokens = table.shape[0], table.shape[1] * key.shape[1]
    check_inputs(query, *(jax.ShapeDtypeStruct((*tokens, *x.shape[2:]), x.dtype) for x in (key, value)))
    return table.astype(jnp.int32)


def wrong_pages(table: Array, pages: tuple[int, ...], lengths: Any) -> Array | None:
    """bool[B]: a page that the sequence needs does not exist. ValueError where that is known, None where none is."""
    count, size = pages[:2]
    first = np.arange(table.shape[1]) * size
    needed = first[None] < (np.array([[2**31 - 1]]) if lengths is None else jnp.asarray(lengths)[:, None])
    wrong = needed & ((table < 0) | (table >= count))
    if isinstance(wrong, jax.core.Tracer):
        return wrong.any(1)
    if (found := np.argwhere(on_host(wrong))).size:
        sequence, place = found[0].tolist()
        raise ValueError(
            f"page_table[{sequence}, {place}]={on_host(table)[sequence, place]} must be a page from 0 to {count - 1}, "
            f"the pages of key and value; only entries at or past key_value_seq_lengths may be anything"
        )
    return None


@jax.custom_jvp
def forward_only(arrays: dict[str, Any]) -> dict[str, Any]:
    return arrays


@forward_only.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "attention with page_table is forward only: for gradients, give key and value as [B, S, K, D]"
    )
