"""Priorities that divide a layer's blocks among its heads; priorities within a head: `study.methods.ranking`."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from xsake.hads.study.methods.layer import Layer, Priority
from xsake.hads.study.methods.ranking import rank_in_row


def scaled_count(score: Priority, heads: Float[Array, "*B H"]) -> Priority:
    """The same number of blocks in every row of a head; numbers of different heads in the proportions of `heads`."""
    return -(rank_in_row(score).astype(jnp.float32) + 0.5) / heads[..., None, None]


def pooled_mass(share: Priority, floor: Float[Array, ""] | float) -> Priority:
    """The `floor` largest masses of every row first, then the largest masses of all heads together (AdaKV)."""
    return jnp.where(rank_in_row(share).astype(jnp.float32) < floor, 2.0, share)


def head_shares(x: Layer) -> Float[Array, "H"]:
    """Per head, the share of its free blocks that it gets by calibration at the middle of the profile's budgets."""
    table = jnp.asarray(x.profile.head_shares)
    return table[len(table) // 2, x.number]
