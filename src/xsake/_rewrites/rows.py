"""Queries of several heads in the rows of one head: what few queries and packed heads share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from xsake.backend.contract import Call
from xsake.hads.mask.band import Band
from xsake.hads.mask.block_mask import BlockMask


def in_rows(call: Call, query: Array, mask: BlockMask, of_tokens: Callable[[Array], Array]) -> Call:
    """The call with queries of several heads in the rows of one; `of_tokens` takes a number per query to the rows.

    Sinks are left out: they belong to heads. A band is applied by positions, which tell the rows apart; the mask's own
    index rule is dropped, since the band contains it.
    """
    positions = call.q_positions
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(call.q_len, dtype=jnp.int32), call.query.shape[:2])
    return dataclasses.replace(
        call,
        query=query,
        mask=dataclasses.replace(mask, is_causal=False, local_window_size=None),
        q_segments=None if call.q_segments is None else of_tokens(call.q_segments),
        q_positions=None if call.band == Band() else of_tokens(positions),
        sink_lse=None,
        full_is_known=call.full_is_exact,
    )
