"""Kernels inside jit over several devices: XLA cannot look into a kernel, and is told here how to partition it.

Batch and heads stay sharded: a device runs the kernels on its sequences and heads, and the counts of the cut are summed
over the devices. Any other sharding is gathered. XLA's own program needs no such rule.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xsake._ground.explicit import names_of
from xsake._ground.trace import name_of_mesh
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.selection.cut import Cut
from xsake.hads.selection.devices.heads_of_shard import divides, heads_of_shard, specs_of_shards
from xsake.hads.selection.given import Given

Program = Callable[..., Any]  # program(grid, masks, room, given, cut=cut)


def partitioned(
    kernels: Program, otherwise: Program, grid: CausalGrid, masks: int, room: int | None, given: Given, cut: Cut
) -> Any:
    """The blocks or lists of `kernels`, partitioned by jit over batch and heads. `vmap` takes `otherwise`, by XLA."""
    leaves, tree = jax.tree.flatten(given)
    ranks, heads = tuple(x.ndim for x in leaves), (given.query.shape[2], given.key.shape[2])
    named = name_of_mesh()
    ranks += tuple(x.ndim for x in named)
    return _partitioned(kernels, otherwise, grid, masks, room, cut, tree, ranks, heads)(*leaves, *named)


@lru_cache(maxsize=64)
def _partitioned(
    kernels: Program,
    otherwise: Program,
    grid: CausalGrid,
    masks: int,
    room: int | None,
    cut: Cut,
    tree: Any,
    ranks: tuple[int, ...],
    heads: tuple[int, int],
) -> Callable[..., Any]:
    q_heads, kv_heads = heads

    def run(program: Program, *leaves: Any) -> Any:
        return program(grid, masks, room, tree.unflatten(leaves[: tree.num_leaves]), cut=cut)

    # A partitioned function may have no constants: those of the program inside jit are not its own.
    split = custom_partitioning(jax.jit(partial(run, kernels)))

    def partition(mesh: Any, arguments: Any, results: Any) -> tuple[Any, Callable[..., Any], Any, Any]:
        batch, _, axes, _ = (*arguments[0].sharding.spec, None, None, None, None)[:4]
        names = names_of(axes)
        shards = math.prod(mesh.shape[name] for name in names)
        if not divides(q_heads, kv_heads, masks, shards):
            names, shards = (), 1
        specs = *specs_of_shards(batch, names, kv_heads, shards), *(P() for _ in arguments[2:])

        def local(*leaves: Any) -> Any:
            given = heads_of_shard(tree.unflatten(leaves[: tree.num_leaves]), kv_heads, names)
            return kernels(grid, masks // shards, room, given, cut=dataclasses.replace(cut, heads_axes=names))

        out = jax.tree.map(lambda _: NamedSharding(mesh, P(batch, names or None)), results)
        return mesh, local, out, tuple(NamedSharding(mesh, spec) for spec in specs)

    rule, sizes = _rule(q_heads, kv_heads, masks, ranks, (4,) if room is None else (3, 3, 3))
    split.def_partition(partition=partition, sharding_rule=rule, **sizes)
    call = jax.custom_batching.custom_vmap(lambda *leaves: split(*leaves))

    @call.def_vmap
    def _(size: int, is_batched: Any, *leaves: Any) -> Any:
        in_axes = [0 if batched else None for batched in is_batched]
        out = jax.vmap(partial(run, otherwise), in_axes)(*leaves)
        return out, jax.tree.map(lambda _: True, out)

    return call


def _rule(
    q_heads: int, kv_heads: int, masks: int, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> tuple[str, dict[str, int]]:
    """Shardy's rule, and the sizes of factors that no dimension has alone: batch and heads pass, all others differ.

    >>> _rule(8, 2, 8, (4, 4, 1), (3,))
    ('b x0 (k g) x1, b x2 k x3, x4 -> b (k g) x5', {'g': 4})
    """
    number = itertools.count()

    def others(rank: int) -> list[str]:
        return [f"x{next(number)}" for _ in range(rank)]

    group = q_heads // kv_heads
    kv = "k"
    q = kv if group == 1 else "g" if kv_heads == 1 else "(k g)"
    of_masks = q if masks == q_heads else kv

    def qk(heads: str) -> str:
        tokens, features = others(2)
        return f"b {tokens} {heads} {features}"

    arguments = [qk(q), qk(kv), *(" ".join(others(rank)) for rank in inputs[2:])]
    results = [" ".join(["b", of_masks, *others(rank - 2)]) for rank in outputs]
    return f"{', '.join(arguments)} -> {', '.join(results)}", {"g": group} if q == "(k g)" else {}
