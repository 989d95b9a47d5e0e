"""Which device holds what: a mesh with axes "data", "model" and "sequence", and rules from parameter names to its axes.

Over "model", matrices are split by heads and inner features (Megatron): a block needs two sums over devices. Over
"data", batches are split, and over "sequence" the tokens of each sequence. With `fsdp`, parameters and the state of the
optimiser are split over these two as well.
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
    (r"blocks/\d+/attention/(query|key|value)/bias", P("model")),
    (r"blocks/\d+/attention/(query|key)_norm/scale", P()),
    (r"blocks/\d+/attention/output/kernel", P("model", None)),
    (r"blocks/\d+/mlp/(gate|up)/kernel", P(None, "model")),
    (r"blocks/\d+/mlp/down/kernel", P("model", None)),
    (r"(blocks/\d+/(attention|mlp)_(post_)?)?norm/scale", P()),
)
AXES = ("data", "model", "sequence")
BATCH = P(None, "data", None)  # microbatches, sequences, tokens


def make_mesh(data: int = 1, model: int = 1, sequence: int = 1) -> Mesh:
    """A mesh of `data` x `model` x `sequence` devices; with several processes it must hold all devices of all of them.

    Devices along "sequence" are neighbours: they exchange most.
    """
    sizes = (data, model, sequence)
    wanted, here = math.prod(sizes), jax.device_count()
    text = " x ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
    if min(sizes) < 1:
        raise ValueError(f"the mesh {text}: each must be at least 1")
    if wanted > here:
        raise ValueError(f"the mesh {text} needs {wanted} devices, and there are {here}")
    if wanted < here and jax.process_count() > 1:
        raise ValueError(
            f"the mesh {text} has {wanted} devices and must hold all {here} of the {jax.process_count()} processes"
        )
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:wanted])


def shard_model(model: Any, mesh: Mesh, *, fsdp: bool = False) -> Any:
    """The model with its weights on the mesh, by the trainer's rules. Weights that are there already are not copied."""
    from flax import nnx

    graph, weights = nnx.split(model)
    params = nnx.to_pure_dict(weights)
    nnx.replace_by_pure_dict(weights, jax.device_put(params, parameter_shardings(params, mesh, fsdp=fsdp)))
    return nnx.merge(graph, weights)


def check_generation(mesh: Mesh, prompts: int) -> None:
    """Raise ValueError if a mesh cannot serve generation: prompts are split over "data", heads over "model"."""
    if mesh.shape["sequence"] > 1:
        raise ValueError(f"generation does not cut sequences: sequence={mesh.shape['sequence']} of the mesh must be 1")
    if prompts % mesh.shape["data"]:
        raise ValueError(f"{prompts} prompts cannot be divided over the mesh's data={mesh.shape['data']}")


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
        if fsdp:
            axes = _split_further(shape, axes, mesh)
        return NamedSharding(mesh, P(*axes))

    return jax.tree_util.tree_map_with_path(of, params)


def _split_further(shape: tuple[int, ...], axes: list[Any], mesh: Mesh) -> list[Any]:
    """Split the largest whole dimension that can be, over "data" and "sequence"; without one, replicate."""
    over = tuple(axis for axis in ("data", "sequence") if mesh.shape[axis] > 1)
    size = math.prod(mesh.shape[axis] for axis in over)
    free = [i for i, axis in enumerate(axes) if axis is None and shape[i] % size == 0]
    if over and free and math.prod(shape) > size:
        axes[max(free, key=lambda i: shape[i])] = over if len(over) > 1 else over[0]
    return axes
