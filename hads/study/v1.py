"""HADS-v1, the project's first idea: a head's entropy decides once and for all what share of blocks it keeps.

A high entropy (broad attention) keeps more. Kept for comparison: at equal budgets a static mask does no better than a
sink and a window on natural text.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

LEAST, MOST = 0.15, 0.85  # focused heads skip 80-90% of the blocks, broad heads 10-20%


def keep_ratio(entropy: Float[Array, "L H"]) -> Float[Array, "L H"]:
    """Each head's share of blocks before a budget scales them all: linear in its entropy, over all heads [L, H].

    >>> keep_ratio(jnp.array([[0.0, 0.5, 1.0]])).tolist() == jnp.array([[0.15, 0.5, 0.85]]).tolist()
    True
    """
    low, high = entropy.min(), entropy.max()
    place = jnp.where(high > low, (entropy - low) / jnp.maximum(high - low, 1e-9), 0.5)
    return LEAST + (MOST - LEAST) * place
