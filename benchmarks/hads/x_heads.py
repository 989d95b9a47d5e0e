"""XAttention with a threshold per head, fitted offline, as its authors offer beside one threshold for all heads.

For each row of blocks: the fewest blocks that hold COVERED of the true mass, and the share of the antidiagonal scores
above the lowest-ranked of them. A head's threshold is the mean of that share over rows and texts.
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

from xsake._ground import atomic
from xsake.hads.calibration.block_statistics import block_statistics
from xsake.hads.calibration.layerwise import Layers
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.study.layerwise import attend, project
from xsake.hads.study.methods import ranking
from xsake.hads.study.methods.layer import Layer, Priority
from xsake.hads.study.methods.registry import FORMS
from xsake.hads.study.methods.scores import antidiagonal_shares

STRIDE, COVERED = 8, 0.9
MOST = 0.999  # a threshold of 1 would keep every block at any budget


class Thresholds(NamedTuple):
    """The share of a row's antidiagonal scores that each of L layers' H heads keeps."""

    share: Float[Array | np.ndarray, "L H"]

    def save(self, path: Path) -> None:
        with atomic.replacing(path) as file:
            np.savez(file, **self._asdict())

    @classmethod
    def load(cls, path: Path) -> Thresholds:
        with np.load(path, allow_pickle=False) as file:
            return cls(*(file[name] for name in cls._fields))


def x_attention_8_heads(x: Layer) -> Priority:
    """XAttention with stride 8 and a threshold t per head; first and diagonal block on.

    A budget changes all thresholds together: a head drops (1 - t) z of its scores in every row, for one z that the
    budget sets. At z = 1 the thresholds are those that were fitted.
    """
    if not isinstance(x.knowledge, Thresholds):
        raise ValueError(
            f"x_attention_8_heads needs knowledge=Thresholds(...) (`x_heads.measure`); got {x.knowledge!r}"
        )
    held = ranking.held_before(antidiagonal_shares(x.query, x.key, x.grid, STRIDE))
    dropped = 1 - jnp.minimum(jnp.asarray(x.knowledge.share)[x.number], MOST)
    left = jnp.log(jnp.maximum(1 - held, 1e-30)) - jnp.log(dropped)[None, :, None, None]
    return x.everywhere(ranking.first_and_diagonal(x.grid)) + left


METHODS = (x_attention_8_heads,)
NAMES = frozenset(f"{method.__name__}{form}" for method in METHODS for form in FORMS)


def shape(config: Any) -> Thresholds:
    """Thresholds with a shape in place of the array, for programs that are compiled ahead."""
    return Thresholds(jax.ShapeDtypeStruct((config.layers, config.q_heads), jnp.float32))


def measure(model: Any, tokens: Int[np.ndarray, "N T"], block: int) -> Thresholds:
    """The thresholds of a model's heads under dense attention, as means over N sequences."""
    layers, grid = Layers(model), CausalGrid(tokens.shape[1], block)
    total = np.zeros((len(layers.weights), model.config.q_heads))
    for sequence in tokens:
        x, rotation = layers.start(jnp.asarray(sequence[None], jnp.int32))
        for number, weights in enumerate(layers.weights):
            inputs = project(layers.graph, weights, x, rotation, None)
            total[number] += np.asarray(needed(inputs[0], inputs[1], grid))
            x = attend(layers.graph, model.attention_fn, weights, x, rotation, inputs)
    return Thresholds((total / len(tokens)).astype(np.float32))


@partial(jax.jit, static_argnames="grid")
def needed(query: Float[Array, "1 T H D"], key: Float[Array, "1 T K D"], grid: CausalGrid) -> Float[Array, "H"]:
    """Per head, the mean over rows of the share of scores that ranks above the last block of those that cover."""
    mass = block_statistics(query, key, block=grid.block).mass[0]
    held = ranking.held_before(antidiagonal_shares(query, key, grid, STRIDE)[0])
    covers = (ranking.held_before(mass) < COVERED) & grid.causal()
    return jnp.where(covers, held, 0).max(-1).mean(-1)
