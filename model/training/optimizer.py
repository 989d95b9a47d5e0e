"""AdamW with a learning rate of warm-up and cosine, weight decay on matrices only, and clipped gradients."""

from __future__ import annotations

from typing import Any

import jax
import optax

from xsake.model.training.config import TrainConfig


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Linear over the warm-up, then a cosine down to `final_fraction` at the last step."""
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / max(config.warmup, 1),  # from 0, the first step would do nothing
        peak_value=config.learning_rate,
        warmup_steps=config.warmup,
        decay_steps=max(config.steps, config.warmup + 1),
        end_value=config.learning_rate * config.final_fraction,
    )


def matrices(params: Any) -> Any:
    """True where weight decay applies: not on norms."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            learning_rate(config),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=matrices,
        ),
    )
