"""Published ways to turn block scores into a mask, each as a priority: the highest ones are its mask at a budget.

A method's own knob (k, a share of mass, a threshold) is one number for a whole layer, so cutting the priorities of the
layer anywhere gives the mask for some value of the knob, and any number of blocks can be had exactly.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

Blocks = Float[Array, "B H n n"]


def rank_in_row(score: Float[Array, "*lead n"]) -> Int[Array, "*lead n"]:
    """0 for the highest of a row, 1 for the next, ...; of equal ones the later (nearer) one first."""
    order = jnp.argsort(score[..., ::-1], -1, descending=True, stable=True)
    return jnp.argsort(order, -1)[..., ::-1]


def constant_count(score: Blocks) -> Blocks:
    """The same number of blocks in every row (top-k): priority falls with the rank."""
    return -rank_in_row(score).astype(jnp.float32)


def constant_share(share: Blocks) -> Blocks:
    """The fewest blocks of a row that hold a given share of its mass (top-p): priority falls with what is held."""
    return -held_before(share)


def held_before(share: Float[Array, "*lead n"]) -> Float[Array, "*lead n"]:
    """The mass of a row's blocks that rank above each block."""
    order = jnp.argsort(share[..., ::-1], -1, descending=True, stable=True)
    sorted_share = jnp.take_along_axis(share[..., ::-1], order, -1)
    before = jnp.cumsum(sorted_share, -1) - sorted_share
    return jnp.take_along_axis(before, jnp.argsort(order, -1), -1)[..., ::-1]


def near_peak(log_score: Float[Array, "*lead n"]) -> Float[Array, "*lead n"]:
    """Blocks whose score comes within a factor of the row's highest: priority is the logarithm of the factor."""
    return log_score - log_score.max(-1, keepdims=True)


def scaled_count(score: Blocks, heads: Float[Array, "*B H"]) -> Blocks:
    """As `constant_count`, with the numbers of different heads in given proportions."""
    return -(rank_in_row(score).astype(jnp.float32) + 0.5) / heads[..., None, None]


def pooled_mass(share: Blocks, floor: Float[Array, ""] | float) -> Blocks:
    """The largest masses of all heads together, after a constant count of `floor` in every row (AdaKV)."""
    return jnp.where(rank_in_row(share).astype(jnp.float32) < floor, 2.0, share)


def softmax(logits: Blocks) -> Blocks:
    return jax.nn.softmax(logits, -1)
