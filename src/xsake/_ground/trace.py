"""The context in which a call is traced: interpreted or compiled, and over which mesh axes its arrays vary."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec

_interpret: contextvars.ContextVar[bool] = contextvars.ContextVar("xsake_interpret", default=False)


@contextlib.contextmanager
def interpret(on: bool = True) -> Iterator[None]:
    """Inside the `with` block, accelerator backends are interpreted on any machine: slow, for tests and for debugging.

    The block is read while tracing: a function that was compiled outside the block is not interpreted inside.
    """
    token = _interpret.set(on)
    try:
        yield
    finally:
        _interpret.reset(token)


def interpreting() -> bool:
    """Whether this is inside `xsake.interpret()`: kernels of an accelerator are interpreted on the CPU."""
    return _interpret.get()


def known_flag(name: str, value: Any) -> bool:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} must be True or False, known while tracing; got {value!r}: name it in static_argnames")
    return bool(value)


def jit_may_partition() -> bool:
    """Whether jit may divide what is traced here among devices: there are several, and no `jax.shard_map` around."""
    return jax.device_count() > 1 and AxisType.Manual not in jax.sharding.get_abstract_mesh().axis_types


def varying_axes(tree: Any) -> frozenset[str]:
    """The mesh axes over which anything in the tree varies: empty outside `jax.shard_map`."""
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(tree)))


def vary(tree: Any, axes: frozenset[str]) -> Any:
    """The same values, typed as varying over all of `axes`. The transpose of `vary` sums over the added axes."""

    def cast(x: Array) -> Array:
        missing = tuple(axes - varying_axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def name_of_mesh() -> list[Array]:
    """A number that lies on the mesh of `jax.set_mesh`, if there is one.

    JAX tells `custom_partitioning` the mesh on which some argument or result of a jitted function lies. Where none lies
    on a mesh, it tells an empty mesh, for which no rule can be compiled.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return []
    return [jax.jit(lambda: jnp.zeros(()), out_shardings=NamedSharding(mesh, PartitionSpec()))()]
