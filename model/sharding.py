"""Which device holds what: a mesh with axes "data" and "model", and rules from parameter names to its axes.

Over "model", matrices are split by heads and inner features (Megatron): a block needs two sums over devices. Over
"data", batches are split, and with `fsdp` also the parameters and the state of the optimiser.
"""

from __future__ import annotations

import math
import re
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

RULES: tuple[tuple[str, P], ...] = (
    (r"embed/embedding", P("model", None)),
    (r"head/kernel", P(None, "model")),
    (r"blocks/\d+/attention/(query|key|value)/kernel", P(None, "model")),
    (r"blocks/\d+/attention/output/kernel", P("model", None)),
    (r"blocks/\d+/mlp/(gate|up)/kernel", P(None, "model")),
    (r"blocks/\d+/mlp/down/kernel", P("model", None)),
    (r"(blocks/\d+/(attention|mlp)_)?norm/scale", P()),
)
BATCH = P(None, "data", None)  # microbatches, sequences, tokens


def make_mesh(data: int = 1, model: int = 1) -> Mesh:
    """A mesh of `data` x `model` devices; with several processes it must hold all devices of all of them."""
    wanted, here = data * model, jax.device_count()
    if data < 1 or model < 1:
        raise ValueError(f"mesh {data=} x {model=}: both must be at least 1")
    if wanted > here:
        raise ValueError(f"the mesh {data=} x {model=} needs {wanted} devices, and there are {here}")
    if wanted < here and jax.process_count() > 1:
        raise ValueError(
            f"the mesh {data=} x {model=} has {wanted} devices and must hold all {here} of the {jax.process_count()} "
            f"processes"
        )
    types = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, model), ("data", "model"), axis_types=types, devices=jax.devices()[:wanted])


def parameter_name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def parameter_shardings(params: Any, mesh: Mesh, *, fsdp: bool = False) -> Any:
    """A NamedSharding per parameter. Each must match a rule, and the mesh must divide the dimensions that are split."""

    def of(path: tuple[Any, ...], parameter: Any) -> NamedSharding:
        name, shape = parameter_name(path), parameter.shape
        spec = next((spec for pattern, spec in RULES if re.fullmatch(pattern, name)), None)
        if spec is None:
            raise ValueError(f"no sharding rule matches parameter {name!r} of shape {shape}")
        axes = [*spec, *[None] * (len(shape) - len(spec))]
        for size, axis in zip(shape, axes, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"parameter {name!r}: {size} cannot be divided over the mesh's {axis}={mesh.shape[axis]}"
                )
        if fsdp and mesh.shape["data"] > 1:
            axes = _split_over_data(shape, axes, mesh.shape["data"])
        return NamedSharding(mesh, P(*axes))

    return jax.tree_util.tree_map_with_path(of, params)


def _split_over_data(shape: tuple[int, ...], axes: list[Any], size: int) -> list[Any]:
    """Split the largest whole dimension that `size` divides over "data"; without one, replicate the parameter."""
    free = [i for i, axis in enumerate(axes) if axis is None and shape[i] % size == 0]
    if free and math.prod(shape) > size:
        axes[max(free, key=lambda i: shape[i])] = "data"
    return axes
