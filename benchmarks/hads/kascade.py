"""Our block-level version of Kascade: few anchor layers know their true masses; the layers after them reuse the choice.

As published: the query heads of a KV head share their blocks, by the sum of their attention; each row of blocks keeps
the same share of what it sees; the diagonal block is always on; a reusing head takes the blocks of the anchor's head
that is most like it; layer 0 is an anchor. Anchors are found by dynamic programming, as those whose choice holds most
of the attention of the layers after them, layers weighted by how much their attention changes the hidden states.

What differs: Kascade chooses single keys for tiles of 32 queries, ours blocks of keys for blocks of queries. Its layer
0 is dense; ours has as many blocks as every other method has there. A reusing layer ranks blocks as its anchor does,
but keeps as many as the budget gives that layer.
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

from xsake._ground import atomic
from xsake.hads.calibration.block_statistics import block_statistics
from xsake.hads.calibration.layerwise import Layers
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.study.methods.layer import Layer, Remembered
from xsake.hads.study.methods.ranking import ALWAYS, rank_in_row
from xsake.hads.study.methods.registry import keep_with_diagonal

ANCHORS = 5  # as in the published settings of models with 32 and 36 layers
SHARE, LEAST_TOKENS = 0.1, 128  # of a row: its published setting, by which layers are compared

Mass = Float[Array, "B K n n"]


class Plan(NamedTuple):
    """Which of L layers are anchors, and for each KV head of a layer the head of its anchor whose blocks it takes."""

    anchor: Bool[Array | np.ndarray, "L"]
    head: Int[Array | np.ndarray, "L K"]

    def save(self, path: Path) -> None:
        with atomic.replacing(path) as file:
            np.savez(file, **self._asdict())

    @classmethod
    def load(cls, path: Path) -> Plan:
        with np.load(path, allow_pickle=False) as file:
            return cls(*(file[name] for name in cls._fields))


def kascade(x: Layer) -> Remembered:
    """An anchor remembers its true masses; a layer after it keeps the largest masses of its anchor."""
    if not isinstance(x.knowledge, Plan):
        raise ValueError(f"kascade needs knowledge=Plan(...) (`kascade.measure`); got {x.knowledge!r}")
    anchor, head = (jnp.asarray(of)[x.number] for of in x.knowledge)
    mass = group_mass(x) if x.memory is None else jax.lax.cond(anchor, lambda: group_mass(x), lambda: x.memory)
    mine = jnp.take(mass, head, axis=1)
    seen = jnp.arange(1, x.grid.columns + 1, dtype=jnp.float32)[:, None]
    rank = rank_of_others(mine, x.grid).astype(jnp.float32)
    priority = jnp.where(rank < _least(x.grid), ALWAYS - rank, -(rank + 0.5) / seen)
    return Remembered(keep_with_diagonal(x, jnp.repeat(priority, x.shape[1] // x.key.shape[2], 1)), mass)


def group_mass(x: Layer) -> Mass:
    """The true masses of blocks, added up over the query heads of each KV head."""
    return _of_groups(block_statistics(x.query, x.key, block=x.grid.block).mass, x.key.shape[2])


def rank_of_others(mass: Float[Array, "*B n n"], grid: CausalGrid) -> Int[Array, "*B n n"]:
    """Ranks in each row without the diagonal block, which is kept anyway and has -1: 0 for the largest mass, ..."""
    return rank_in_row(jnp.where(grid.distance() == 0, jnp.inf, jnp.where(grid.causal(), mass, -1.0))) - 1


def _of_groups(mass: Float[Array, "B H n n"], kv_heads: int) -> Mass:
    b, h, n, _ = mass.shape
    return mass.reshape(b, kv_heads, h // kv_heads, n, n).sum(2)


def _least(grid: CausalGrid) -> int:
    """Blocks that a row keeps at least, beside the diagonal one."""
    return max(LEAST_TOKENS // grid.block, 1)


NAMES = frozenset({"kascade", "kascade+forced"})


def shape(config: Any) -> Plan:
    """A plan with shapes in place of arrays, for programs that are compiled ahead."""
    heads = jax.ShapeDtypeStruct((config.layers, config.kv_heads), jnp.int32)
    return Plan(jax.ShapeDtypeStruct((config.layers,), jnp.bool_), heads)


# -- calibration -------------------------------------------------------------------------------------------------------


def measure(model: Any, tokens: Int[np.ndarray, "N T"], block: int) -> Plan:
    """The plan of a model from N sequences under dense attention."""
    layers, grid = Layers(model), CausalGrid(tokens.shape[1], block)
    count, kv_heads = len(layers.weights), model.config.kv_heads
    alike, importance = np.zeros((count, count, kv_heads, kv_heads)), np.zeros(count)
    for sequence in tokens:
        x, rotation = layers.start(jnp.asarray(sequence[None], jnp.int32))
        masses = []
        for number, weights in enumerate(layers.weights):
            x, mass, change = observe(layers.graph, model.attention_fn, weights, x, rotation, grid)
            masses.append(mass)
            importance[number] += float(change)
        for a in range(count):
            for b in range(a, count):
                alike[a, b] += np.asarray(similarity(masses[a], masses[b], grid))
    return plan_of(alike / len(tokens), importance / len(tokens))


@partial(jax.jit, static_argnames=("graph", "attention_fn", "grid"))
def observe(
    graph: Any, attention_fn: Any, weights: Any, x: Array, rotation: Any, grid: CausalGrid
) -> tuple[Array, Float[Array, "K n n"], Float[Array, ""]]:
    """A block's output, the masses of its KV heads, and one minus the cosine between the hidden states before and after
    its attention."""
    from flax import nnx

    block = nnx.merge(graph, weights)
    seen = []

    def look(q: Array, k: Array, v: Array) -> tuple[Array, None]:
        seen.append(_of_groups(block_statistics(q, k, block=grid.block).mass, k.shape[2])[0])
        return attention_fn(q, k, v, is_causal=True).astype(q.dtype), None

    attended, _ = block.attention(block.attention_norm(x), rotation, look)
    middle = x + attended
    before, after = x.astype(jnp.float32), middle.astype(jnp.float32)
    cosine = (before * after).sum(-1) / (jnp.linalg.norm(before, axis=-1) * jnp.linalg.norm(after, axis=-1))
    return middle + block.mlp(block.mlp_norm(middle)), seen[0], 1 - cosine.mean()


@partial(jax.jit, static_argnames="grid")
def similarity(anchor: Float[Array, "K n n"], layer: Float[Array, "K n n"], grid: CausalGrid) -> Float[Array, "K K"]:
    """For each head of a layer and each head of an anchor: the attention that the anchor's choice of blocks holds in
    the layer, over the attention that the layer's own choice holds, in the row where that is least."""
    count = np.maximum(_least(grid), np.round(SHARE * (np.arange(grid.columns) + 1)))[:, None]
    theirs, own = (rank_of_others(mass, grid) < count.astype(np.int32) for mass in (anchor, layer))
    held = jnp.einsum("aij,hij->hai", theirs.astype(jnp.float32), layer, precision=jax.lax.Precision.HIGHEST)
    return (held / jnp.where(own, layer, 0).sum(-1)[:, None]).min(-1)


def plan_of(alike: Float[np.ndarray, "L L K K"], importance: Float[np.ndarray, "L"], anchors: int = ANCHORS) -> Plan:
    """The plan from `alike[anchor, layer, head, head of the anchor]` and the weight of each layer."""
    count = len(importance)
    chosen = best_anchors(alike.max(-1).mean(-1) * importance, min(anchors, count))
    anchor = np.isin(np.arange(count), chosen)
    of_layer = np.maximum.accumulate(np.where(anchor, np.arange(count), 0))
    head = alike[of_layer, np.arange(count)].argmax(-1)
    head[anchor] = np.arange(head.shape[1])
    return Plan(anchor, head.astype(np.int32))


def best_anchors(gain: Float[np.ndarray, "L L"], anchors: int) -> list[int]:
    """The anchors, layer 0 among them, for which the sum of `gain[nearest anchor before, layer]` is largest.

    >>> gain = np.array([[3.0, 2, 0, 0], [0, 3, 1, 1], [0, 0, 3, 2], [0, 0, 0, 3]])
    >>> best_anchors(gain, 2)
    [0, 2]
    """
    count = len(gain)
    total = np.concatenate([np.zeros((count, 1)), np.cumsum(np.triu(gain), 1)], 1)
    best = np.full((anchors + 1, count + 1), -np.inf)  # of the layers before one, with so many anchors
    last = np.zeros((anchors + 1, count + 1), int)
    best[0, 0] = 0
    for used in range(1, anchors + 1):
        for end in range(1, count + 1):
            values = [best[used - 1, a] + total[a, end] - total[a, a] for a in range(end)]
            last[used, end] = int(np.argmax(values))
            best[used, end] = values[last[used, end]]
    found, end = [], count
    for used in range(anchors, 0, -1):
        end = int(last[used, end])
        found.append(end)
    return found[::-1]
