"""Everything that decides the numbers of a training run. Two runs of equal configurations give equal losses."""

from __future__ import annotations

import dataclasses
from typing import Any

from xsake._ground.fields import check_fields, field
from xsake._ground.kinds import FLAG, TEXT, number, one_of, whole
from xsake.model.network.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A model and how it is trained.

    Args:
      model: its shape.
      length: tokens per sequence, at most the model's context.
      batch: sequences per step.
      microbatches: parts of a step's batch, computed one after the other, whose gradients are averaged.
      steps: number of steps; the learning rate falls until the last.
      learning_rate: the highest learning rate, reached after `warmup` steps.
      warmup: steps over which the learning rate rises linearly.
      final_fraction: share of the learning rate that is left at the last step, after falling as a cosine.
      weight_decay: of AdamW, on matrices only.
      beta1, beta2: of AdamW.
      clip: the largest norm of the gradients of all parameters; larger gradients are scaled down to it.
      attention: "dense", "cudnn", "hads" or a pattern; see `xsake.model.training.attention`.
      density: the share of active blocks; a pattern takes the nearest density that it can have in blocks of `block`
        tokens, and is refused if that differs by more than a quarter.
      block: tokens per block.
      recalibrate_every: steps between calls of the recalibration callback; 0 for once, at the start.
      dtype: of activations and matrix products; weights and optimiser are float32.
      remat: keep only the states between transformer blocks for the backward pass; compute the rest again.
      loss_chunk: tokens per device whose logits exist at the same time.
      seed: of the initial weights and of the order of the data. All randomness is a function of seed and step, so that
        a checkpoint needs no state of a random generator.
    """

    model: ModelConfig
    length: int = field(whole())
    batch: int = field(whole())
    steps: int = field(whole())
    microbatches: int = field(whole(), default=1)
    learning_rate: float = field(number(above=0), default=1e-3)
    warmup: int = field(whole(0), default=100)
    final_fraction: float = field(number(least=0, most=1), default=0.1)
    weight_decay: float = field(number(least=0), default=0.1)
    beta1: float = field(number(least=0, below=1), default=0.9)
    beta2: float = field(number(least=0, below=1), default=0.95)
    clip: float = field(number(above=0), default=1.0)
    attention: str = field(TEXT, default="dense")
    density: float = field(number(above=0, most=1), default=1.0)
    block: int = field(whole(), default=128)
    recalibrate_every: int = field(whole(0), default=0)
    dtype: str = field(one_of("bfloat16", "float32"), default="bfloat16")
    remat: bool = field(FLAG, default=False)
    loss_chunk: int = field(whole(), default=8192)
    seed: int = field(whole(0, 2**32 - 1), default=0)  # jax.random.key would quietly drop higher bits

    def __post_init__(self) -> None:
        check_fields(self)
        if self.length > self.model.context:
            raise ValueError(f"length={self.length} is beyond the model's context of {self.model.context} tokens")
        if self.batch % self.microbatches:
            raise ValueError(f"batch={self.batch} must be divisible by microbatches={self.microbatches}")
        if self.warmup > self.steps:
            raise ValueError(f"warmup={self.warmup} must be at most steps={self.steps}")

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.length

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainConfig:
        """Raises ValueError if the values are no training configuration of this version."""
        try:
            return cls(**values | {"model": ModelConfig(**values["model"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a training configuration that this xsake knows: {error}") from error
