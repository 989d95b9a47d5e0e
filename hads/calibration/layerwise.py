"""Run a transformer block by block: one small compiled program for all layers, in place of one as large as the model.

A model here is an `xsake.model.Transformer`, or anything with its parts: `blocks` that are alike and are
called as `block(x, rotation, attend)`, `start`, `norm` and `logits`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import Array
from jaxtyping import Float, Int

Attend = Callable[[Array, Array, Array], Array]


class Layers:
    """A model's blocks for compiled programs: `graph`, which all blocks share, and each block's `weights`."""

    def __init__(self, model: Any):
        from flax import nnx

        self.model = model
        split = [nnx.split(block) for block in model.blocks]
        self.graph = split[0][0]
        if any(graph != self.graph for graph, _ in split):
            raise ValueError("the model's blocks are not alike: they cannot share a program")
        self.weights = [weights for _, weights in split]

    @property
    def window(self) -> int | None:
        """Tokens that a token sees, itself among them, in every layer; None for all, or if layers differ."""
        config = getattr(self.model, "config", None)
        return None if getattr(config, "window_from", 0) else getattr(config, "window", None)

    def start(self, tokens: Int[Array, "B T"], *, windowed: bool = False) -> tuple[Float[Array, "B T width"], Any]:
        """The first block's inputs: embedded tokens, and the rotary positions.

        NotImplementedError if the model has a window within the tokens, unless the caller honours `window`.
        """
        limit = getattr(getattr(self.model, "config", None), "window", None)
        if limit is not None and limit < tokens.shape[1] and not (windowed and self.window is not None):
            raise NotImplementedError(
                f"this model's attention has a window of {limit} tokens"
                f"{'' if self.window else ' in some layers'}, which is not modelled here: use sequences of at most "
                f"{limit} tokens, not {tokens.shape[1]}"
            )
        return self.model.start(tokens)


def wait_on_device(count: int, x: Array) -> bool:
    """Whether `count` arrays like `x` are little beside the device's memory: then they need not wait on the host, from
    where they come back more slowly than a block runs. A device that does not tell its memory keeps none."""
    room = (next(iter(x.devices())).memory_stats() or {}).get("bytes_limit", 0)
    return count * x.nbytes <= room // 8


def run_block(graph: Any, weights: Any, x: Array, rotation: Any, attend: Attend) -> Array:
    """One block's output, with `attend(query, key, value)` in place of its attention."""
    from flax import nnx

    out, _ = nnx.merge(graph, weights)(x, rotation, lambda q, k, v: (attend(q, k, v), None))
    return out


def attention_rule(window: int | None) -> dict[str, Any]:
    """The arguments of dense attention in a model with this window."""
    return {"is_causal": True} if window is None else {"is_causal": True, "local_window_size": (window - 1, 0)}
