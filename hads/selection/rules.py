"""The rules of a call of attention that HADS knows: causality, one window to the left, a scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax import Array
from jaxtyping import Float

from xsake.hads.mask.band import NO_LIMIT


@dataclasses.dataclass(frozen=True)
class Rules:
    """A query sees itself and the `window - 1` tokens before it, None for all; logits are multiplied by `scale`."""

    window: int | None = None
    scale: float | None = None

    @classmethod
    def of(cls, rules: Mapping[str, Any]) -> Rules:
        """From the arguments of a call, named as those of `xsake.attention`; None is an argument that is left out.

        NotImplementedError for others.
        """
        given = {name: value for name, value in rules.items() if value is not None}
        if not given.pop("is_causal", True):
            raise NotImplementedError("is_causal=False: HADS chooses blocks for causal attention only")
        if rate := given.pop("dropout_rate", 0.0):
            raise NotImplementedError(
                f"dropout_rate={rate}: attention weights are never formed, so none can be dropped; drop the layer's "
                "output instead"
            )
        window, scale = given.pop("local_window_size", None), given.pop("scale", None)
        if given:
            raise NotImplementedError(
                f"{', '.join(sorted(given))}: HADS knows is_causal, local_window_size and scale here"
            )
        return cls(_window(window), None if scale is None else float(scale))

    def arguments(self) -> dict[str, Any]:
        """The arguments of dense attention."""
        window = {} if self.window is None else {"local_window_size": (self.window - 1, 0)}
        return {"is_causal": True} | window | ({} if self.scale is None else {"scale": self.scale})

    def scaled(self, query: Float[Array, "B T H D"]) -> Float[Array, "B T H D"]:
        """Queries whose logits are the same with the scale D ** -0.5, which HADS takes."""
        if self.scale is None:
            return query
        return (query * (self.scale * query.shape[-1] ** 0.5)).astype(query.dtype)


def _window(size: Any) -> int | None:
    left, right = size if isinstance(size, tuple) else (size, size)
    if right is not None and right < 0:
        raise NotImplementedError(f"local_window_size={size}: a query must see its own token")
    return None if left is None or left >= NO_LIMIT else int(left) + 1
