"""The question that a plan answers, checked when it is made."""

from __future__ import annotations

import dataclasses

from xsake._plan.devices import Device
from xsake._plan.rates import recorded_blocks, shipped_points
from xsake.model.network.config import ModelConfig

FSDP = ("all", "data", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """One model, one step (or one prefill), a number of devices.

    Args:
      config: the model.
      device: which accelerator, with its links.
      devices: how many.
      tokens: per sequence.
      density: active blocks over the blocks that the causal rule allows.
      batch: sequences per step, or per prefill.
      block: tokens per mask block.
      prefill: a forward that fills a cache, instead of a training step.
      union: for `sparse`, the share of the other devices' K and V that the lists of a device's rows name.
      fsdp: weights, gradients and optimiser are split over "all" devices, over the "data" axis, or "none".
      remat: whether activations are recomputed; None: where they do not fit otherwise.
      overlap: the share of the communication that could hide behind other work and does.
      imbalance: blocks that the busiest device walks, over the mean.
      mfu: the share of the peak that all work beside attention reaches; None: by recorded training steps.
    """

    config: ModelConfig
    device: Device
    devices: int
    tokens: int
    density: float = 1.0
    batch: int = 8
    block: int = 128
    prefill: bool = False
    union: float = 0.6
    fsdp: str = "all"
    remat: bool | None = None
    overlap: float = 0.8
    imbalance: float = 1.02
    mfu: float | None = None

    def __post_init__(self) -> None:
        for name in ("devices", "tokens", "batch", "block"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("density", "union", "mfu"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name}={value} must be above 0 and at most 1")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap={self.overlap} must be between 0 and 1")
        if not 1 <= self.imbalance < float("inf"):
            raise ValueError(f"imbalance={self.imbalance} must be at least 1")
        if self.fsdp not in FSDP:
            raise ValueError(f"fsdp={self.fsdp!r} must be one of {', '.join(FSDP)}")
        known = recorded_blocks(shipped_points(), self.device.recorded_as)
        if self.block not in known:
            raise ValueError(
                f"block={self.block}: on {self.device.recorded_as} throughputs are recorded for blocks of "
                f"{' and '.join(map(str, known))}"
            )
        if self.tokens % self.block:
            raise ValueError(f"tokens={self.tokens} must be a multiple of block={self.block}: blocks are never cut")
        least = 2 / (self.tokens // self.block + 1)
        if self.density < least:
            raise ValueError(
                f"density={self.density} is too low for {self.tokens} tokens in blocks of {self.block}: the diagonal "
                f"alone is {least:.4f} of the causal blocks"
            )
