"""Everything that decides the numbers of a training run. Two runs with equal ones give equal losses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from xsake.model.config import ModelConfig

DTYPES = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A model and how it is trained.

    Args:
      model: its shape.
      length: tokens of a sequence, at most the model's context.
      batch: sequences of a step.
      microbatches: a step's sequences in so many parts, one after the other, whose gradients are averaged.
      steps: how many; the learning rate falls until the last.
      learning_rate, warmup, final_fraction: it rises linearly over `warmup` steps, then falls as a cosine to
        `final_fraction` of itself.
      weight_decay, beta1, beta2, clip: AdamW's, with decay on matrices only; gradients are clipped to this norm.
      attention: "dense", "cudnn", "hads" or a pattern; see `xsake.model.train_attention`.
      density, block: the share of active blocks (the nearest that a pattern has), and the size of a block.
      recalibrate_every: steps between calls of the recalibration callback; 0 for once, at the start.
      dtype: of activations and matrix products; weights and optimiser are float32.
      remat: keep only what lies between blocks for the backward pass.
      loss_chunk: tokens whose logits exist at once on a device.
      seed: of the initial weights and of the order of the data. Randomness is counted from it and the step, so that the
        step in a checkpoint is all the state there is.
    """

    model: ModelConfig
    length: int
    batch: int
    steps: int
    microbatches: int = 1
    learning_rate: float = 1e-3
    warmup: int = 100
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    attention: str = "dense"
    density: float = 1.0
    block: int = 128
    recalibrate_every: int = 0
    dtype: str = "bfloat16"
    remat: bool = False
    loss_chunk: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("length", "batch", "steps", "microbatches", "block", "loss_chunk"):
            _at_least(name, getattr(self, name), 1)
        for name in ("warmup", "recalibrate_every", "seed"):
            _at_least(name, getattr(self, name), 0)
        for name in ("learning_rate", "clip"):
            _number(name, getattr(self, name), "above 0", lambda x: x > 0)
        for name in ("beta1", "beta2"):
            _number(name, getattr(self, name), "at least 0 and below 1", lambda x: 0 <= x < 1)
        _number("weight_decay", self.weight_decay, "at least 0", lambda x: x >= 0)
        _number("final_fraction", self.final_fraction, "at least 0 and at most 1", lambda x: 0 <= x <= 1)
        _number("density", self.density, "above 0 and at most 1", lambda x: 0 < x <= 1)
        if self.length > self.model.context:
            raise ValueError(f"length={self.length} is beyond the model's context of {self.model.context} tokens")
        if self.batch % self.microbatches:
            raise ValueError(f"batch={self.batch} must be divisible by microbatches={self.microbatches}")
        if self.warmup > self.steps:
            raise ValueError(f"warmup={self.warmup} must be at most steps={self.steps}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")

    @property
    def tokens_a_step(self) -> int:
        return self.batch * self.length

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainConfig:
        return cls(**values | {"model": ModelConfig(**values["model"])})


def _at_least(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} must be an int of at least {least}")


def _number(name: str, value: Any, allowed: str, good: Callable[[float], bool]) -> None:
    if not isinstance(value, int | float) or not math.isfinite(value) or not good(value):
        raise ValueError(f"{name}={value!r} must be a finite number, {allowed}")
