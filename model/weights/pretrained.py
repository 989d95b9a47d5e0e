"""Load trained weights: a published model by its name, a model of a known family from its file, or a training run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

import xsake
from xsake.model.network.transformer import Transformer
from xsake.model.weights.model_file import ModelFile, WeightsFile, open_model
from xsake.model.weights.trained_run import TrainedRun

if TYPE_CHECKING:
    from xsake.model.text.tokenizer import Tokenizer

AT_ONCE = min(os.cpu_count() or 1, 16)  # tensors that are read and dequantised side by side: so many wait in float32


def load_pretrained(
    path_or_name: str | os.PathLike | ModelFile,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    param_dtype: DTypeLike = jnp.float32,
    attention_fn: Callable[..., Any] = xsake.attention,
) -> Transformer:
    """A `Transformer` with trained weights.

    Args:
      path_or_name: a name of `xsake.model.weights.published.PUBLISHED`, fetched before; a GGUF file; a safetensors file
        or its folder; the folder of a training run, for its last checkpoint; or one of these opened by `open_model`.
        The architecture must be one of
        `xsake.model.network.families`; anything in the file that the model would not use is an error.
      dtype, param_dtype, attention_fn: the `Transformer`'s.
    """
    file = open_model(path_or_name)
    types: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, attention_fn=attention_fn)
    if isinstance(file, TrainedRun):
        return file.load(**types)
    if missing := sorted(set(file.names.values()) - file.tensor_names):
        raise ValueError(f"{file.path} lacks {len(missing)} tensors: {_some(missing)}")
    if unused := sorted(file.tensor_names - set(file.names.values())):
        raise ValueError(
            f"{file.path} is not a plain {file.family.hugging_face_class}: no use for {len(unused)} of its tensors: "
            f"{_some(unused)}"
        )
    rows = _rows(file)
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(file.config, rngs=nnx.Rngs(0), **types)))

    def read(path: tuple[Any, ...]) -> np.ndarray:
        weight = file.read(file.names[path], rows[path])
        return weight.T if path[-1] == "kernel" else weight

    weights, variables = [], list(nnx.to_flat_state(state))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for first in range(0, len(variables), AT_ONCE):
            some = variables[first : first + AT_ONCE]
            for (path, variable), weight in zip(some, pool.map(read, [path for path, _ in some]), strict=True):
                weights.append((path, variable.replace(jnp.asarray(weight, param_dtype))))
    return nnx.merge(graph, nnx.from_flat_state(weights))


def _rows(file: WeightsFile) -> dict[tuple[Any, ...], slice]:
    """The rows of its tensor that each parameter takes: all, or those after other parameters' rows.

    Every tensor's shape is checked before any tensor is read. All layers have the shapes of the first.
    """
    one_layer = dataclasses.replace(file.config, layers=1)
    state = nnx.state(nnx.eval_shape(lambda: Transformer(one_layer, rngs=nnx.Rngs(0))))
    expected = {path: variable.shape for path, variable in nnx.to_flat_state(state)}
    rows: dict[tuple[Any, ...], slice] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path, name in file.names.items():
        shape = expected[("blocks", 0, *path[2:]) if path[0] == "blocks" else path]
        shape = shape[::-1] if path[-1] == "kernel" else shape
        first = shapes[name][0] if name in shapes else 0
        rows[path] = slice(first, first + shape[0])
        shapes[name] = (first + shape[0], *shape[1:])
    for name, wanted in shapes.items():
        if file.shape(name) != wanted:
            raise ValueError(
                f"{file.path}: {name} has shape {file.shape(name)}, but by the file's configuration it has {wanted}"
            )
    return rows


def load_tokenizer(path_or_name: str | os.PathLike | ModelFile) -> Tokenizer:
    """The tokenizer of the model that `load_pretrained` loads."""
    file = open_model(path_or_name)
    tokenizer = file.tokenizer()
    tokens = 1 + max(tokenizer.core.get_vocab().values(), default=0)  # the numbers may have gaps
    if tokens > file.config.vocab_size:
        raise ValueError(f"{file.path}: the tokenizer has {tokens} tokens, but the model only {file.config.vocab_size}")
    return tokenizer


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
