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
    def learned(self) -> tuple[LayerWeights | None, ...]:
        """The profile's knowledge of each layer, moved to the device once, not with every prompt."""
        p = self.profile
        return tuple(None if p.row(n) is None else LayerWeights.of(p, n) for n in range(p.model_layers))

    def check(self, config: ModelConfig, length: int) -> None:
        """Raise ValueError if the profile cannot be this model's, or if it does not know the window within `length`."""
        p = self.profile
        wanted = (config.layers, config.q_heads, config.kv_heads, config.head_dim)
        if (p.model_layers, p.q_heads, p.kv_heads, p.head_dim) != wanted:
            raise ValueError(
                f"the profile of {p.model!r} is for (layers, query heads, KV heads, head_dim)="
                f"{(p.model_layers, p.q_heads, p.kv_heads, p.head_dim)}; this model has {wanted}: calibrate this model"
            )
        if (p.window, p.windowed) == (config.window if config.same_window else None, config.windowed):
            return
        if not p.windowed and min(config.window or length, p.window or length) >= length:
            return
        if p.windowed != config.windowed:
            ours, its = (f"layers {list(x)}" if x else "no layers" for x in (config.windowed, p.windowed))
            raise ValueError(
                f"HADS leaves layers with a window alone where others have none, in this model {ours}, and the profile "
                f"of {p.model!r} leaves out {its}: calibrate this model again"
            )
        ours, its = ("no window" if x is None else f"a window of {x} tokens" for x in (config.window, p.window))
        raise ValueError(
            f"this model's attention has {ours}, and the profile of {p.model!r} was made for {its}, which matters at "
            f"{length} tokens: calibrate this model again"
        )
