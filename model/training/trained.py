"""The model of a training run, from its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import xsake
from xsake.model.network.sharding import make_mesh
from xsake.model.network.transformer import Transformer
from xsake.model.training.checkpoints import Checkpoints
from xsake.model.training.config import TrainConfig
from xsake.model.training.step import Program
from xsake.model.training.watch.run_file import CHECKPOINTS_FOLDER


def load_trained(
    run: Path,
    *,
    step: int | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    param_dtype: DTypeLike = jnp.float32,
    attention_fn: Callable[..., Any] = xsake.attention,
) -> Transformer:
    """The model that `xsake train` left in the folder `run`, after `step` steps (by default, the last checkpoint).

    The weights are in `param_dtype`, the arithmetic is in `dtype`. Whatever attention the model was trained with, it
    attends with `attention_fn`, densely unless it is called with a `mask_fn`.
    """
    step, _, config = describe(run, step)
    program = Program(config=config, mesh=make_mesh(), attention_fn=attention_fn)
    with Checkpoints(run / CHECKPOINTS_FOLDER, read_only=True) as checkpoints:
        params = checkpoints.restore(step, "state", program.abstract_state()).params
    params = jax.tree.map(lambda x: x.astype(param_dtype), params)
    types: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, attention_fn=attention_fn)
    model = nnx.eval_shape(lambda: Transformer(config.model, rngs=nnx.Rngs(0), **types))
    nnx.update(model, nnx.State(params))
    return model


def describe(run: Path, step: int | None = None) -> tuple[int, dict[str, Any], TrainConfig]:
    """(the step of a checkpoint, by default of the last one, the run's description, its configuration)."""
    folder = run / CHECKPOINTS_FOLDER
    if not folder.is_dir():
        raise FileNotFoundError(f"{run} holds no training run: there is no folder {CHECKPOINTS_FOLDER}")
    with Checkpoints(folder, read_only=True) as checkpoints:
        steps = checkpoints.steps()
        if not steps:
            raise FileNotFoundError(f"{run} has no checkpoint yet: go on with the run, or give one that has")
        if step is not None and step not in steps:
            raise FileNotFoundError(f"{run} has no checkpoint of step {step}; it has {steps}")
        step = steps[-1] if step is None else step
        about = checkpoints.describe(step)
    return step, about, TrainConfig.from_json(about["config"])
