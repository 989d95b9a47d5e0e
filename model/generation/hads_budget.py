"""HadsBudget: how sparsely a model reads a prompt and writes its continuation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import jax

from xsake._ground import kinds
from xsake._ground.fields import check_fields, field
from xsake._ground.kinds import maybe, number
from xsake.hads import Attention, HadsProfile, LayerWeights, Policy
from xsake.hads.attention.policy import Decision, Kind
from xsake.model.network.config import ModelConfig

_POLICY = kinds.Kind(
    lambda value: isinstance(value, Policy) or value in ("auto", "always"), '"auto", "always" or a hads.Policy'
)


@dataclasses.dataclass(frozen=True)
class HadsBudget:
    """HADS in generation.

    Args:
      profile: of this model, from `xsake.hads.calibrate`.
      prompt: the share of the causal blocks that is read, over the whole prompt; every chunk has an exact part of it.
        None for all blocks.
      decode: the share of the cache's blocks that every new token attends to, in every layer; None for all blocks.
      policy: as in `hads.Attention`: "auto" reads and writes densely where sparse attention would not be faster, and
        keeps more blocks where few would harm the answer; "always" keeps to the shares.
    """

    profile: HadsProfile
    prompt: float | None = field(maybe(number(above=0, most=1)))
    decode: float | None = field(maybe(number(above=0, most=1)), default=None)
    policy: Literal["auto", "always"] | Policy = field(_POLICY, default="auto")

    def __post_init__(self) -> None:
        check_fields(self)

    def _attention(self) -> Attention:
        return Attention(self.profile, self.prompt or 1.0, decode=self.decode, policy=self.policy)

    def decisions(
        self, lengths: Sequence[int], *, chunk: int | None, dtype: Any, device: str | None = None
    ) -> dict[str, Decision]:
        """What reading prompts of these lengths, and writing after them, runs: "prompt" and "decode", where there is a
        share for it. The longest prompt decides for all of its chunks, the shortest one for what is written."""
        if self.policy == "always":
            shares = {"prompt": self.prompt, "decode": self.decode}
            return {name: Decision(share, "always") for name, share in shares.items() if share is not None}
        known: dict[str, Any] = dict(batch=len(lengths), device=device or jax.local_devices()[0].device_kind)
        known["dtype"] = jax.numpy.dtype(dtype).name
        attention, found, longest = self._attention(), {}, max(lengths)
        if self.prompt is not None:
            whole = chunk is None or not 0 < chunk < longest
            queries = longest if whole or chunk is None else chunk
            kind: Kind = "prompt" if whole else "chunk"
            found["prompt"] = attention.decide(kind, queries=queries, keys=longest, **known)
        if self.decode is not None:
            found["decode"] = attention.decide("decode", queries=1, keys=min(lengths) + 1, **known)
        return found

    def as_decided(self, decisions: dict[str, Decision]) -> HadsBudget:
        """The shares that were decided, None where that is dense."""
        shares = {name: decisions[name].budget if name in decisions else None for name in ("prompt", "decode")}
        return HadsBudget(self.profile, **shares, policy="always")

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
