"""The model of a training run, from its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

import xsake
from xsake.model.network.sharding import make_mesh
from xsake.model.network.transformer import Transformer
from xsake.model.training.checkpoints import Checkpoints
from xsake.model.training.config import TrainConfig
from xsake.model.training.loop import CHECKPOINTS_FOLDER
from xsake.model.training.step import Program


def load_trained(run: Path, *, step: int | None = None, dtype: Any = jnp.bfloat16) -> Transformer:
    """The model that `xsake train` left in the folder `run`, after `step` steps (by default, the last checkpoint).

    The weights are float32, the arithmetic is in `dtype`. Whatever attention the model was trained with, it attends
    with `xsake.attention`, densely unless it is called with a `mask_fn`.
    """
    folder = run / CHECKPOINTS_FOLDER
    if not folder.is_dir():
        raise FileNotFoundError(f"{run} holds no training run: there is no folder {CHECKPOINTS_FOLDER}")
    with Checkpoints(folder, read_only=True) as checkpoints:
        steps = checkpoints.steps()
        if not steps or (step is not None and step not in steps):
            asked = "any step" if step is None else f"step {step}"
            raise FileNotFoundError(f"{run} has no checkpoint of {asked}; it has {steps or 'none'}")
        step = steps[-1] if step is None else step
        config = TrainConfig.from_json(checkpoints.describe(step)["config"])
        program = Program(config=config, mesh=make_mesh(), attention_fn=xsake.attention)
        params = checkpoints.restore(step, "state", program.abstract_state()).params
    model = nnx.eval_shape(lambda: Transformer(config.model, rngs=nnx.Rngs(0), dtype=dtype))
    nnx.update(model, nnx.State(params))
    return model
