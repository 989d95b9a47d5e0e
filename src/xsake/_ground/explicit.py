"""Explicit mesh axes: how arrays lie on them is part of the arrays' types, and every operation must say how its result
lies. With auto axes none of this is needed: XLA partitions the program itself.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

Names = tuple[str, ...]


def explicit_mesh(tree: Any) -> Any:
    """The mesh of the first array that lies on explicit axes; None where no array does."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree))
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def names_of(entry: Any) -> Names:
    """The mesh axes that an entry of a spec names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def axes_of(x: Any) -> tuple[Names, ...]:
    """The explicit mesh axes that cut each dimension of an array."""
    spec = jax.typeof(x).sharding.spec
    return (*map(names_of, spec), *((),) * (x.ndim - len(spec)))


def placed(mesh: Any, x: Any, spec: PartitionSpec) -> Any:
    """The array, lying on explicit axes of the mesh as `spec` says."""
    names = tuple(map(names_of, spec))
    names += ((),) * (x.ndim - len(names))
    if jax.typeof(x).sharding.mesh == mesh and axes_of(x) == names:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def placed_like(like: Array, x: Array) -> Array:
    """`x`, its first dimensions cut over explicit axes as those of `like` are."""
    mesh = explicit_mesh(like)
    if mesh is None:
        return x
    shared = [names or None for names, _ in zip(axes_of(like), x.shape, strict=False)]
    return placed(mesh, x, PartitionSpec(*shared))


def all_or(mesh: Any, names: Collection[str]) -> frozenset[str]:
    """The `axis_names` of a `jax.shard_map` over these axes of the mesh: empty, which stands for all, if they are all.

    Then JAX leaves out an axis over which `jax.vmap` maps; a set that names such an axis is an error.
    """
    return frozenset(() if set(names) == set(mesh.axis_names) else names)


def over_explicit_axes(run: Callable, given: tuple, dims: tuple[str, ...], results: str) -> Any:
    """Compute `run(*given)`. On explicit axes, each device computes its part of the batch and of the heads.

    `dims` names the first dimensions of each entry of `given`, an array or a tree of arrays, and `results` those of
    every result: "b t h" is batch, tokens, heads. Batch and heads are cut as in the first array where they are cut;
    other dimensions are whole on every device, and so are heads if some array's cannot be cut so. A dimension of size 1
    is shared.
    """
    mesh = explicit_mesh(given)
    if mesh is None or not any(map(any, map(axes_of, jax.tree.leaves(given)))):
        return run(*given)
    arrays = [(x, names.split()) for part, names in zip(given, dims, strict=True) for x in jax.tree.leaves(part)]
    batch, heads = _axes_that_cut("b", arrays), _axes_that_cut("h", arrays)
    heads = tuple(name for name in heads if name not in batch)
    cut = {"b": batch, "h": heads if _divides_heads(mesh, heads, arrays) else ()}

    def spec(names: str, shared: Collection[int] = ()) -> PartitionSpec:
        axes = (cut.get(dim) or None for dim in names.split())
        return PartitionSpec(*(None if i in shared else entry for i, entry in enumerate(axes)))

    def spec_of(x: Any, names: str) -> PartitionSpec:
        return spec(names, [i for i, size in enumerate(x.shape) if size == 1])

    specs = tuple(jax.tree.map(partial(spec_of, names=names), part) for part, names in zip(given, dims, strict=True))
    local = jax.shard_map(
        run, mesh=mesh, in_specs=specs, out_specs=spec(results), axis_names=all_or(mesh, mesh.explicit_axes)
    )

    # In one program: alone, an array on one device could not be placed on a mesh that only the others' types name.
    @partial(jax.jit, inline=True)
    def program(*given: Any) -> Any:
        return local(*jax.tree.map(partial(placed, mesh), given, specs))

    return program(*given)


_Named = list[tuple[Any, list[str]]]  # arrays, and the names of their dimensions


def _axes_that_cut(dim: str, arrays: _Named) -> Names:
    """The axes that cut `dim` in the first array where it is cut."""
    return next((axes for x, names in arrays if dim in names and (axes := axes_of(x)[names.index(dim)])), ())


def _divides_heads(mesh: Any, axes: Names, arrays: _Named) -> bool:
    """Whether the axes can cut every array's heads into equal parts. Warns if they cannot."""
    parts = math.prod(mesh.shape[name] for name in axes)
    heads = {x.shape[names.index("h")] for x, names in arrays if "h" in names} - {1}
    if all(count % parts == 0 for count in heads):
        return True
    warnings.warn(
        f"xsake gathers arrays that are sharded along heads over the mesh axes {', '.join(axes)}: {parts} devices "
        f"cannot divide {' and '.join(map(str, sorted(heads)))} heads",
        stacklevel=4,
    )
    return False
