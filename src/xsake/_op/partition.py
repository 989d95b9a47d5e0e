"""One call on many devices: batch and heads are cut where the arrays are, and every device runs its part.

Explicit mesh axes are part of the arrays' types, so the parts are known while tracing and `jax.shard_map` runs them.
Auto axes are known only to the compiler, which asks through `custom_partitioning`. Both need the same three things:
what each dimension of an array stands for, which mesh axes cut batch and heads, and what a device does with its part.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export
from jax.sharding import NamedSharding, PartitionSpec

from xsake._ground.explicit import all_or, axes_of, explicit_mesh, names_of, placed
from xsake._ground.trace import name_of_mesh
from xsake._rewrites.dims import Dims, call_dims, flat_dims
from xsake.backend.contract import Call

Axes = tuple[str, ...]

# Nothing here outlives the process, so that no promise of stable kernels is needed.
_KERNELS = [
    export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu", "mosaic_gpu_v2", "__gpu$xla.gpu.triton")
]


class MeshCut(NamedTuple):
    """The mesh axes that cut the batch and the heads, and whether the K/V heads are cut with the query heads."""

    batch: Axes
    heads: Axes
    kv_heads: bool

    def axes(self, dim: str | None) -> Axes:
        if dim == "b":
            return self.batch
        return self.heads if dim == "h" or (dim == "k" and self.kv_heads) else ()

    def spec(self, dims: Dims) -> PartitionSpec:
        return PartitionSpec(*(self.axes(dim) or None for dim in dims))

    def missing(self, dims: Dims) -> Axes:
        """Axes that cut the call, but not an array of these dimensions: every device has a sum of its own for it."""
        used = {name for dim in dims for name in self.axes(dim)}
        return tuple(name for name in self.batch + self.heads if name not in used)


def over_mesh(run: Callable, given: tuple, given_dims: tuple, result_dims: tuple, *, by_compiler: bool) -> tuple:
    """`run(*given)`, a tuple of arrays, with each device computing its part. The first of `given` is the `Call`.

    `run` is also called with parts: a call with a part of the batch and of the heads. A result that lacks a dimension
    over which the call is cut is a sum over the devices. Without `by_compiler`, arrays on auto axes are left to XLA,
    which gathers what it cannot cut.
    """
    call: Call = given[0]
    mesh = jax.typeof(call.query).sharding.mesh
    operation = _Operation(run, call.q_heads, call.kv_heads, given_dims, result_dims)
    if (explicit := explicit_mesh(given) or _explicit_around()) is not None:
        return operation.by_shard_map(explicit, given)
    # Inside the caller's own shard_map, or with one device, there is nothing to cut.
    if mesh.manual_axes or jax.device_count() == 1 or not isinstance(call.batch, int) or not by_compiler:
        return run(*given)
    return operation.by_compiler(given)


def _explicit_around() -> Any:
    """The explicit mesh of `jax.set_mesh`, on all of whose devices arrays that lie on no mesh are whole, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.explicit_axes and not mesh.manual_axes else None


Lengths = tuple[Array | None, Array | None]  # of queries, and of keys


def cut_alike(call: Call, lengths: Lengths) -> tuple[Call, Lengths]:
    """The call and the lengths of its sequences: on explicit axes, all of them cut as the call will be.

    Arrays may be given cut in any way, and JAX refuses an operation on two that are cut differently.
    """
    mesh = explicit_mesh((call, lengths))
    if mesh is None:
        return call, lengths
    values, tree = jax.tree.flatten((call, lengths))
    dims = flat_dims((call_dims(call), [("b",) for x in lengths if x is not None]))
    cut = _cut(call.q_heads, call.kv_heads, mesh.shape, dims, [axes_of(x) for x in values])

    def alike(x: Array, dims: Dims) -> Array:
        """An array on no mesh combines with any other; `over_mesh` places it later."""
        return x if explicit_mesh(x) is None else placed(mesh, x, cut.spec(dims))

    return jax.tree.unflatten(tree, map(alike, values, dims))


@dataclasses.dataclass(frozen=True)
class _Operation:
    run: Callable
    q_heads: int
    kv_heads: int
    given_dims: tuple
    result_dims: tuple

    def by_shard_map(self, mesh: Any, given: tuple) -> tuple:
        dims, values = flat_dims(self.given_dims), jax.tree.leaves(given)
        cut = _cut(self.q_heads, self.kv_heads, mesh.shape, dims, [axes_of(x) for x in values])
        want = [cut.spec(d) for d in dims]
        lying = [placed(mesh, x, spec) for x, spec in zip(values, want, strict=True)]
        tree = jax.tree.structure(given)

        def local(*parts: Array) -> tuple:
            return self.part(cut, jax.tree.unflatten(tree, parts))

        out_specs = tuple(cut.spec(d) for d in self.result_dims)
        names = all_or(mesh, set(mesh.axis_names) - set(mesh.manual_axes))
        return jax.shard_map(local, mesh=mesh, in_specs=tuple(want), out_specs=out_specs, axis_names=names)(*lying)

    def by_compiler(self, given: tuple) -> tuple:
        from jax.experimental.custom_partitioning import custom_partitioning

        values, tree = jax.tree.flatten(given)

        def whole(*parts: Array) -> tuple:
            return self.run(*jax.tree.unflatten(tree, parts))

        # custom_partitioning takes no function that holds constants: they become arguments, which a part leaves unused.
        traced = jax.make_jaxpr(whole)(*values)
        if traced.effects:
            return dataclasses.replace(self, run=_without_effects(self.run)).by_compiler(given)
        constants = [*map(jnp.asarray, traced.consts), *name_of_mesh()]
        dims = flat_dims(self.given_dims) + [(None,) * x.ndim for x in constants]

        def partition(mesh: Any, args: tuple, results: Any) -> tuple:
            cut = _cut(self.q_heads, self.kv_heads, mesh.shape, dims, [x.sharding.spec for x in args])

            def local(*parts: Array) -> tuple:
                return self.part(cut, jax.tree.unflatten(tree, parts[: len(values)]))

            def place(d: Dims) -> NamedSharding:
                return NamedSharding(mesh, cut.spec(d))

            return mesh, local, tuple(map(place, self.result_dims)), tuple(map(place, dims))

        def unpartitioned(*args: Array) -> tuple:
            consts = args[len(values) : len(values) + len(traced.consts)]
            return tuple(jax.core.eval_jaxpr(traced.jaxpr, consts, *args[: len(values)]))

        operation = custom_partitioning(unpartitioned)
        operation.def_partition(partition, sharding_rule=self.rule(dims))
        return operation(*values, *constants)

    def rule(self, dims: list[Dims]) -> str:
        """The sharding rule for Shardy: equal names are cut alike.

        "h" is one name: as "k" times a group, Shardy would split a mesh axis between the two.
        """
        number = iter(range(1000))

        def side(arrays: Iterable[Dims]) -> str:
            return ", ".join(" ".join(f"u{next(number)}" if dim is None else dim for dim in array) for array in arrays)

        return f"{side(dims)} -> {side(self.result_dims)}"

    def part(self, cut: MeshCut, given: tuple) -> tuple:
        """Run one device's part. Where only query heads are cut, a device takes the one K/V head of its queries."""
        dims = flat_dims(self.given_dims)
        own: Array | None = None
        if cut.heads and not cut.kv_heads and self.kv_heads > 1:
            own = jax.lax.axis_index(cut.heads) * given[0].q_heads * self.kv_heads // self.q_heads
            taken = [self._take(x, d, own) for x, d in zip(jax.tree.leaves(given), dims, strict=True)]
            given = jax.tree.unflatten(jax.tree.structure(given), taken)
        results = self.run(*given)
        return tuple(self._summed(cut, x, d, own) for x, d in zip(results, self.result_dims, strict=True))

    def _take(self, x: Array, dims: Dims, own: Array) -> Array:
        """One K/V head of an array: two heads where keys and values are in one."""
        if "k" not in dims:
            return x
        axis = dims.index("k")
        width = x.shape[axis] // self.kv_heads
        return jax.lax.dynamic_slice_in_dim(x, own * width, width, axis)

    def _summed(self, cut: MeshCut, x: Array, dims: Dims, own: Array | None) -> Array:
        missing = cut.missing(dims)
        if not missing:
            return x
        total = x.astype(np.promote_types(x.dtype, jnp.float32))
        if own is not None and "k" in dims:
            axis = dims.index("k")
            zeros = jnp.zeros((*x.shape[:axis], self.kv_heads, *x.shape[axis + 1 :]), total.dtype)
            total = jax.lax.dynamic_update_slice_in_dim(zeros, total, own, axis)
        return jax.lax.psum(total, missing).astype(x.dtype)


def _without_effects(run: Callable) -> Callable:
    """`run`, lowered while it is traced. Kernels that write to refs, as those of Mosaic GPU do, have effects, which
    custom_partitioning refuses.
    """

    def exported(*given: Any) -> tuple:
        values, tree = jax.tree.flatten(given)
        lowered = export.export(
            jax.jit(lambda *x: run(*jax.tree.unflatten(tree, x))), platforms=("cuda",), disabled_checks=_KERNELS
        )(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values))
        return tuple(lowered.call(*values))

    return exported


def _cut(q_heads: int, kv_heads: int, sizes: Any, dims: list[Dims], specs: list) -> MeshCut:
    """From how the arrays lie: the first one that is cut along batch or heads decides."""
    found: dict[str, Axes] = {}
    for d, spec in zip(dims, specs, strict=True):
        for dim, entry in zip(d, spec, strict=False):
            axes = names_of(entry)
            if axes and dim is not None:
                found.setdefault("h" if dim == "k" else dim, axes)
    lost: list[str] = [name for name in ("t", "s", "d", "e") if name in found]
    batch, heads = found.get("b", ()), found.get("h", ())
    heads = tuple(name for name in heads if name not in batch)
    count = math.prod(sizes[name] for name in heads)
    aligned = q_heads % count == 0 and (kv_heads % count == 0 or (q_heads // kv_heads) % (q_heads // count) == 0)
    if not aligned:
        heads = ()
        lost.append("h")
    _warn(lost)
    return MeshCut(batch, heads, bool(heads) and kv_heads % count == 0)


def _warn(lost: list[str]) -> None:
    what = {"t": "the sequence of queries", "s": "the sequence of keys", "d": "head_dim", "e": "head_dim", "h": "heads"}
    for name in lost:
        remedy = (
            "xsake.sharded_attention keeps a sequence cut"
            if name in "ts"
            else "cut batch and heads instead, by a number that divides the K/V heads or a multiple of it"
        )
        warnings.warn(f"xsake.attention gathers arrays that are sharded along {what[name]}: {remedy}", stacklevel=2)
