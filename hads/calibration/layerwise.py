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

    def start(self, tokens: Int[Array, "B T"]) -> tuple[Float[Array, "B T width"], Any]:
        """What the first block gets: embedded tokens, and the rotary positions."""
        window = getattr(getattr(self.model, "config", None), "window", None)
        if window is not None and window < tokens.shape[1]:
            raise NotImplementedError(
                f"this model's attention has a window of {window} tokens, which is not modelled here: use sequences of "
                f"at most {window} tokens, not {tokens.shape[1]}"
            )
        return self.model.start(tokens)


def run_block(graph: Any, weights: Any, x: Array, rotation: Any, attend: Attend) -> Array:
    """One block's output, with `attend(query, key, value)` in place of its attention."""
    from flax import nnx

    out, _ = nnx.merge(graph, weights)(x, rotation, lambda q, k, v: (attend(q, k, v), None))
    return out
