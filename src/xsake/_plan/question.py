"""The question that a plan answers, checked when it is made."""

from __future__ import annotations

import dataclasses

from xsake._ground.fields import check_fields, field
from xsake._ground.kinds import FLAG, maybe, number, one_of, whole
from xsake._plan.devices import Device
from xsake._plan.rates import recorded_blocks, shipped_points
from xsake.model.network.config import ModelConfig

_SHARE = number(above=0, most=1)


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
      hads: HADS chooses the blocks of a prefill, which takes time.
      union: for `sparse`, the share of the other devices' K and V that the lists of a device's rows name.
      fsdp: weights, gradients and optimiser are split over "all" devices, over the "data" axis, or "none".
      remat: whether activations are recomputed; None: where they do not fit otherwise.
      overlap: the share of the communication that could hide behind other work and does.
      imbalance: blocks that the busiest device walks, over the mean.
      mfu: the share of the peak that all work beside attention reaches; None: by recorded training steps.
    """

    config: ModelConfig
    device: Device
    devices: int = field(whole())
    tokens: int = field(whole())
    density: float = field(_SHARE, default=1.0)
    batch: int = field(whole(), default=8)
    block: int = field(whole(), default=128)
    prefill: bool = field(FLAG, default=False)
    hads: bool = field(FLAG, default=False)
    union: float = field(_SHARE, default=0.6)
    fsdp: str = field(one_of("all", "data", "none"), default="all")
    remat: bool | None = field(maybe(FLAG), default=None)
    overlap: float = field(number(least=0, most=1), default=0.8)
    imbalance: float = field(number(least=1), default=1.02)
    mfu: float | None = field(maybe(_SHARE), default=None)

    def __post_init__(self) -> None:
        check_fields(self)
        known = recorded_blocks(shipped_points(), self.device.recorded_as)
        if self.block not in known:
            raise ValueError(
                f"block={self.block}: on {self.device.recorded_as} throughputs are recorded for blocks of "
                f"{' and '.join(map(str, known))}"
            )
        if self.hads and not self.prefill:
            raise ValueError("hads=True is for a prefill (--prefill): no choice of blocks in training is recorded")
        if self.hads and self.density == 1:
            raise ValueError("hads=True with density=1: HADS chooses nothing where all blocks are kept")
        if self.tokens % self.block:
            raise ValueError(f"tokens={self.tokens} must be a multiple of block={self.block}: blocks are never cut")
        least = 2 / (self.tokens // self.block + 1)
        if self.density < least:
            raise ValueError(
                f"density={self.density} is too low for {self.tokens} tokens in blocks of {self.block}: the diagonal "
                f"alone is {least:.4f} of the causal blocks"
            )
