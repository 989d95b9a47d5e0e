"""Priorities that divide a layer's blocks among its heads; `xsake.hads.study.ranking` has those within a head."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from xsake.hads.study.layer import Layer, Priority
from xsake.hads.study.ranking import rank_in_row


def scaled_count(score: Priority, heads: Float[Array, "*B H"]) -> Priority:
    """The same number of blocks in every row of a head; numbers of different heads in the proportions of `heads`."""
    return -(rank_in_row(score).astype(jnp.float32) + 0.5) / heads[..., None, None]


def pooled_mass(share: Priority, floor: Float[Array, ""] | float) -> Priority:
    """The largest masses of all heads together, after the `floor` largest of every row (AdaKV)."""
    return jnp.where(rank_in_row(share).astype(jnp.float32) < floor, 2.0, share)


def head_shares(x: Layer) -> Float[Array, "H"]:
    """The share of its free blocks that calibration gives each head at the middle one of the profile's budgets."""
    table = jnp.asarray(x.profile.head_shares)
    return table[len(table) // 2, x.number]
