"""Our token-level version of MInference: every head keeps single keys and single diagonals, by a pattern of its own.

As published: a head's pattern is an A-shape (the first keys and the nearest diagonals) or vertical-slash (the keys and
the diagonals that the last 64 queries attend to most; the first 30 keys and the nearest 30 diagonals come first).
Patterns are searched offline, by the share of dense attention that their masks hold. A layer's heads keep equally much.

What differs: published patterns name numbers of lines, ours the share of columns among the lines, and the budget sets
the number: a share of the causal pairs of query and key, which is slightly more than the same share of blocks holds.
The public search takes a block-sparse head for one of 1000 columns and 6096 diagonals; these shares are among ours, and
block-sparse heads are not.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from benchmarks.hads.lines import Lines, first_of_last, keep_lines, pairs_of, recall
from xsake._ground import atomic
from xsake.hads.calibration.layerwise import Layers
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.study.layerwise import attend, project
from xsake.hads.study.methods.layer import Layer
from xsake.hads.study.methods.ranking import rank_in_row

LAST_QUERIES, FIRST = 64, 30
# (A-shape, columns, diagonals): the candidates of the public search, as proportions.
CANDIDATES = (
    (True, 100, 800),
    *((False, columns, diagonals) for columns, diagonals in ((30, 800), (100, 800), (500, 700), (3500, 100))),
    (False, 1000, 6096),
)
SEARCH_BUDGET = 0.2  # the share of pairs at which patterns are compared
SEARCHED = 4  # texts


class Patterns(NamedTuple):
    """The patterns of H heads in each of L layers: whether an A-shape, and which share of the lines is columns."""

    a_shape: Bool[Array | np.ndarray, "L H"]
    vertical: Float[Array | np.ndarray, "L H"]

    def save(self, path: Path) -> None:
        with atomic.replacing(path) as file:
            np.savez(file, **self._asdict())

    @classmethod
    def load(cls, path: Path) -> Patterns:
        with np.load(path, allow_pickle=False) as file:
            return cls(*(file[name] for name in cls._fields))


def minference(x: Layer) -> Lines:
    """The budget is a share of pairs: `count` over the layer's blocks. All heads of a layer keep equally much."""
    if not isinstance(x.knowledge, Patterns):
        raise ValueError(f"minference needs knowledge=Patterns(...) (`minference.measure`); got {x.knowledge!r}")
    grid, heads = x.grid, x.shape[1]
    whole = jnp.asarray(x.count, jnp.float32) * (pairs_of(grid) / (heads * grid.blocks))
    budgets = [whole]
    if x.last_mass is not None:
        raise NotImplementedError("exact masses of blocks do not rank minference's lines of keys and distances")
    if x.last_count is not None:
        blocks = grid.causal()[grid.last_rows()].sum()
        of_last = x.last_count.astype(jnp.float32) * (pairs_of(grid, first_of_last(grid)) / (heads * blocks))
        budgets = [whole - of_last, of_last]
    a_shape, vertical = (jnp.asarray(of)[x.number] for of in x.knowledge)
    return keep_lines(*ranks(x.query, x.key, a_shape), vertical, budgets, grid, x.with_forced)


def ranks(
    query: Float[Array, "B T H D"], key: Float[Array, "B T K D"], a_shape: Bool[Array, "H"]
) -> tuple[Int[Array, "B H T"], Int[Array, "B H T"]]:
    """The ranks of keys and of distances, 0 for what a head keeps first."""
    place = jnp.arange(query.shape[1], dtype=jnp.float32)[None, None]
    fixed = a_shape[None, :, None] | (place < FIRST)
    columns, diagonals = last_queries(query, key)
    # A sum of weights is at most LAST_QUERIES.
    first = 2.0 * LAST_QUERIES + query.shape[1] - place
    return rank_in_row(jnp.where(fixed, first, columns)), rank_in_row(jnp.where(fixed, first, diagonals))


def last_queries(
    query: Float[Array, "B T H D"], key: Float[Array, "B T K D"]
) -> tuple[Float[Array, "B H T"], Float[Array, "B H T"]]:
    """The attention of the last queries, added up by key and by distance."""
    b, t, h, d = query.shape
    some = min(LAST_QUERIES, t)
    q = query[:, t - some :].reshape(b, some, key.shape[2], -1, d).astype(jnp.float32)
    logits = jnp.einsum("btkgd,bskd->bkgts", q, key.astype(jnp.float32)) * d**-0.5
    back = jnp.arange(t - some, t)[:, None] - jnp.arange(t)[None]
    weights = jax.nn.softmax(jnp.where(back >= 0, logits, -jnp.inf), -1).reshape(b, h, some, t)
    # In the row of query q, distance d stands where key q - d stood.
    by_distance = jnp.take_along_axis(weights, jnp.maximum(back, 0)[None, None], -1)
    return weights.sum(-2), jnp.where(back >= 0, by_distance, 0).sum(-2)


NAMES = frozenset({"minference", "minference+forced"})


def shape(config: Any) -> Patterns:
    """Patterns with shapes in place of arrays, for programs that are compiled ahead."""
    size = config.layers, config.q_heads
    return Patterns(jax.ShapeDtypeStruct(size, jnp.bool_), jax.ShapeDtypeStruct(size, jnp.float32))


def measure(model: Any, tokens: Int[np.ndarray, "N T"], block: int) -> Patterns:
    """The best pattern of each head under dense attention, by its mean recall over the first texts."""
    layers, grid = Layers(model), CausalGrid(tokens.shape[1], block)
    total = np.zeros((len(CANDIDATES), len(layers.weights), model.config.q_heads))
    for sequence in tokens[:SEARCHED]:
        x, rotation = layers.start(jnp.asarray(sequence[None], jnp.int32))
        for number, weights in enumerate(layers.weights):
            inputs = project(layers.graph, weights, x, rotation, None)
            total[:, number] += np.asarray(candidate_recall(inputs[0], inputs[1], grid))
            x = attend(layers.graph, model.attention_fn, weights, x, rotation, inputs)
    best = total.argmax(0)
    a_shape, columns, diagonals = (np.asarray(of)[best] for of in zip(*CANDIDATES, strict=True))
    return Patterns(a_shape, (columns / (columns + diagonals)).astype(np.float32))


@partial(jax.jit, static_argnames="grid")
def candidate_recall(
    query: Float[Array, "1 T H D"], key: Float[Array, "1 T K D"], grid: CausalGrid
) -> Float[Array, "candidates H"]:
    """The recall of each candidate, for every head."""
    heads = query.shape[2]
    ranked = {a_shape: ranks(query, key, jnp.full(heads, a_shape)) for a_shape in (False, True)}
    # The candidates side by side, as if they were heads.
    columns, diagonals = (jnp.concatenate([ranked[one[0]][axis] for one in CANDIDATES], 1) for axis in (0, 1))
    vertical = np.repeat([down / (down + along) for _, down, along in CANDIDATES], heads).astype(np.float32)
    every = keep_lines(columns, diagonals, jnp.asarray(vertical), [jnp.asarray(SEARCH_BUDGET * pairs_of(grid))], grid)
    return recall(query, key, [every.of_heads(n * heads, heads) for n in range(len(CANDIDATES))])[:, 0]
