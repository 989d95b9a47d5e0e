"""HADS-v1, the project's first idea: a head's entropy decides once and for all what share of its blocks it keeps.

A head with a high entropy (broad attention) keeps more. Kept for comparison: at equal budgets a static mask does no
better than a sink and a window on natural text.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from benchmarks.hads.patterns import random_of_layer
from benchmarks.hads.ranking import scaled_count
from xsake._ground import atomic
from xsake.hads.calibration.block_statistics import block_statistics, scan_rows
from xsake.hads.calibration.layerwise import Layers
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.estimator import BUCKETS, bucket_of
from xsake.hads.selection.exact import attention_rows
from xsake.hads.study.layerwise import attend, project
from xsake.hads.study.methods import ranking
from xsake.hads.study.methods.layer import Layer, Priority
from xsake.hads.study.methods.registry import FORMS

LEAST, MOST = 0.15, 0.85  # focused heads skip 80-90% of the blocks, broad heads 10-20%


class V1Profile(NamedTuple):
    """The numbers that HADS-v1 keeps for each of L layers and H query heads, from dense attention.

    entropy: Shannon entropy of a query's weights over the logarithm of the number of keys that it sees, in [0, 1], as a
      mean over queries. The first query, which sees a single key, is left out.
    distance_mass: mean mass of a block by bucket of distance, the first column of blocks left out.
    """

    entropy: Float[Array | np.ndarray, "L H"]
    distance_mass: Float[Array | np.ndarray, "L H buckets"]

    def save(self, path: Path) -> None:
        with atomic.replacing(path) as file:
            np.savez(file, **self._asdict())

    @classmethod
    def load(cls, path: Path) -> V1Profile:
        with np.load(path, allow_pickle=False) as file:
            return cls(*(file[name] for name in cls._fields))


# -- the method --------------------------------------------------------------------------------------------------------


def keep_ratio(entropy: Float[Array, "L H"]) -> Float[Array, "L H"]:
    """Each head's share of blocks, before a budget scales all shares: linear in entropy, from LEAST to MOST.

    >>> keep_ratio(jnp.array([[0.0, 0.5, 1.0]])).tolist() == jnp.array([[0.15, 0.5, 0.85]]).tolist()
    True
    """
    low, high = entropy.min(), entropy.max()
    place = jnp.where(high > low, (entropy - low) / jnp.maximum(high - low, 1e-9), 0.5)
    return LEAST + (MOST - LEAST) * place


def hads_v1(x: Layer) -> Priority:
    """The same number of blocks in each row of a head, by its entropy: the blocks of largest mean mass by distance."""
    mass = jnp.asarray(_known(x).distance_mass)[x.number][:, bucket_of(x.grid.distance())]
    return _static(x, x.everywhere(mass))


def hads_v1_random(x: Layer) -> Priority:
    """HADS-v1 with random blocks, as it was first written."""
    return _static(x, jnp.broadcast_to(random_of_layer(x), x.shape))


METHODS = (hads_v1, hads_v1_random)
NAMES = frozenset(f"{method.__name__}{form}" for method in METHODS for form in FORMS)


def _static(x: Layer, score: Priority) -> Priority:
    ratio = keep_ratio(jnp.asarray(_known(x).entropy))[x.number]
    score = jnp.where(x.grid.causal(), score, -1.0)
    return x.everywhere(ranking.first_and_diagonal(x.grid)) + scaled_count(score, ratio)


def _known(x: Layer) -> V1Profile:
    if not isinstance(x.knowledge, V1Profile):
        raise ValueError(f"HADS-v1 needs knowledge=V1Profile(...) of the model (`v1.measure`); got {x.knowledge!r}")
    return x.knowledge


# -- its profile -------------------------------------------------------------------------------------------------------


def shape(config: Any) -> V1Profile:
    """A profile with shapes in place of arrays, for programs that are compiled ahead."""
    size = config.layers, config.q_heads
    head = size, (*size, len(BUCKETS))
    return V1Profile(*(jax.ShapeDtypeStruct(of_heads, jnp.float32) for of_heads in head))


def measure(model: Any, tokens: Int[np.ndarray, "N T"], block: int) -> V1Profile:
    """A model's heads under dense attention, as means over N sequences."""
    layers = Layers(model)
    grid = CausalGrid(tokens.shape[1], block)
    seen: list[list[tuple[Array, Array]]] = [[] for _ in layers.weights]
    for sequence in tokens:
        x, rotation = layers.start(jnp.asarray(sequence[None], jnp.int32))
        for of_layer, weights in zip(seen, layers.weights, strict=True):
            inputs = project(layers.graph, weights, x, rotation, None)
            of_layer.append(_observe(inputs[0], inputs[1], grid))
            x = attend(layers.graph, model.attention_fn, weights, x, rotation, inputs)
    entropy = [np.mean([one for one, _ in of_layer], 0) for of_layer in seen]
    mass = [np.mean([one for _, one in of_layer], 0) for of_layer in seen]
    return V1Profile(np.stack(entropy), np.stack([by_distance(of_heads, grid) for of_heads in mass]))


@partial(jax.jit, static_argnames="grid")
def _observe(
    query: Float[Array, "1 T H D"], key: Float[Array, "1 T K D"], grid: CausalGrid
) -> tuple[Float[Array, "H"], Float[Array, "H n n"]]:
    return mean_entropy(query, key, grid)[0], block_statistics(query, key, block=grid.block).mass[0]


def mean_entropy(query: Float[Array, "B T H D"], key: Float[Array, "B T K D"], grid: CausalGrid) -> Array:
    """f32[B, H]: `V1Profile.entropy` of each sequence."""

    def row(keys: int, i: Array, q: Float[Array, "B K G block D"]) -> Array:
        weights = attention_rows(q, key[:, :keys], i, grid)
        t = i * grid.block + jnp.arange(grid.block)
        # A query that sees one key has entropy 0, and log(1) = 0 to divide by.
        keys = jnp.maximum(jnp.minimum(t + 1, grid.length), 2).astype(jnp.float32)
        entropy = -jnp.sum(weights * jnp.log(jnp.where(weights > 0, weights, 1.0)), -1)
        return jnp.where(t < grid.length, entropy / jnp.log(keys), 0).sum(-1)

    total = scan_rows(row, query, key.shape[2], grid).sum(0)
    return total.reshape(query.shape[0], -1) / max(grid.length - 1, 1)


def by_distance(mass: Float[np.ndarray, "H n n"], grid: CausalGrid) -> np.ndarray:
    """f32[H, buckets]: `V1Profile.distance_mass`; buckets past the farthest distance seen repeat its mass."""
    inside = grid.causal() & (np.arange(grid.columns) > 0)
    bucket = bucket_of(grid.distance())[inside]
    blocks = np.bincount(bucket, minlength=len(BUCKETS))
    sums = np.stack([np.bincount(bucket, head, minlength=len(BUCKETS)) for head in mass[:, inside]])
    means = sums / np.maximum(blocks, 1)
    last = int(bucket.max())
    means[:, last + 1 :] = means[:, last : last + 1]
    return means.astype(np.float32)
