"""Fixed patterns, whose blocks do not depend on the input, each as the priorities of a layer's blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from benchmarks.hads.ranking import head_shares
from xsake.hads.study.methods import ranking
from xsake.hads.study.methods.layer import Layer, Priority


def sliding_window(x: Layer) -> Priority:
    """The nearest blocks."""
    return x.everywhere(-x.grid.distance())


def longformer(x: Layer) -> Priority:
    """Longformer, causal: the first two blocks, whose tokens are global, and the nearest blocks."""
    return x.everywhere(ranking.first_columns(x.grid, 2) - x.grid.distance())


def big_bird(x: Layer) -> Priority:
    """BigBird, causal: the first block, the nearest three, and in every row as many random blocks as fit the budget."""
    fixed = x.everywhere(ranking.first_columns(x.grid, 1) + (x.grid.distance() < 3) * ranking.ALWAYS)
    drawn = jnp.where(x.grid.causal() & (fixed[:1] == 0), random_of_layer(x), -1.0)
    return fixed + ranking.constant_count(drawn)


def power(x: Layer) -> Priority:
    """PowerAttention: blocks 0, 1, 2, 4, 8, ... back, then the nearest blocks."""
    distance = np.maximum(x.grid.distance(), 0)
    return x.everywhere(((distance & (distance - 1)) == 0) * ranking.ALWAYS - distance)


def random(x: Layer) -> Priority:
    """The diagonal block and random blocks."""
    return x.everywhere(ranking.diagonal(x.grid)) + random_of_layer(x)


def duo(x: Layer) -> Priority:
    """DuoAttention-like: as many dense heads as the budget allows; every other head keeps the first, the previous and
    the diagonal block. The dense heads are those to which calibration gives most blocks; the last of them keeps the
    nearest blocks that are left."""
    streaming = ranking.first_columns(x.grid, 1) + (x.grid.distance() <= 1) * ranking.ALWAYS
    place = ranking.rank_in_row(head_shares(x))[:, None, None].astype(jnp.float32)
    return x.everywhere(streaming - x.grid.distance()) - x.grid.columns * place


def random_of_layer(x: Layer) -> Float[Array, "1 H n n"]:
    """Uniform numbers that depend on the layer's number alone."""
    return jax.random.uniform(jax.random.fold_in(jax.random.key(0), x.number), (1, *x.shape[1:]))


PATTERNS = (sliding_window, longformer, big_bird, power, random, duo)
