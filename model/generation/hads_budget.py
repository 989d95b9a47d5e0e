"""HadsBudget: how sparsely a model reads a prompt and writes its continuation."""

from __future__ import annotations

import dataclasses
from functools import cached_property

from xsake._ground.fields import check_fields, field
from xsake._ground.kinds import maybe, number
from xsake.hads import HadsProfile, LayerWeights
from xsake.model.network.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class HadsBudget:
    """HADS in generation.

    Args:
      profile: of this model, from `xsake.hads.calibrate`.
      prompt: the share of the causal blocks that is read, over the whole prompt; every chunk has an exact part of it.
      decode: the share of the cache's blocks that every new token attends to, in every layer; None for all blocks.
    """

    profile: HadsProfile
    prompt: float = field(number(above=0, most=1))
    decode: float | None = field(maybe(number(above=0, most=1)), default=None)

    def __post_init__(self) -> None:
        check_fields(self)

    @cached_property
    def learned(self) -> tuple[LayerWeights, ...]:
        """The profile's knowledge of each layer, moved to the device once, not with every prompt."""
        return tuple(LayerWeights.of(self.profile, layer) for layer in range(self.profile.layers))

    def check(self, config: ModelConfig, length: int) -> None:
        """Raise ValueError if the profile cannot be this model's, or if it does not know the window within `length`."""
        p = self.profile
        wanted = (config.layers, config.q_heads, config.kv_heads, config.head_dim)
        if (p.layers, p.q_heads, p.kv_heads, p.head_dim) != wanted:
            raise ValueError(
                f"the profile of {p.model!r} is for (layers, query heads, KV heads, head_dim)="
                f"{(p.layers, p.q_heads, p.kv_heads, p.head_dim)}; this model has {wanted}: calibrate this model"
            )
        if p.window == config.window and config.same_window:
            return
        if min(config.window or length, p.window or length) >= length:
            return
        if not config.same_window:
            raise NotImplementedError(
                f"only some layers have a window of {config.window} tokens, which HADS does not model: use at most "
                f"{config.window} tokens, not {length}, or read densely"
            )
        ours, its = ("no window" if x is None else f"a window of {x} tokens" for x in (config.window, p.window))
        raise ValueError(
            f"this model's attention has {ours}, and the profile of {p.model!r} was made for {its}, which matters at "
            f"{length} tokens: calibrate this model again"
        )
