"""MethodMask: any registered method as a model's mask function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.profile.causal_grid import CausalGrid
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.selection.select import check_inputs
from xsake.hads.study.methods.by_gain import with_last_rows
from xsake.hads.study.methods.layer import Blocks, Layer, Remembered, TokenMask
from xsake.hads.study.methods.shipped import METHODS

LAST_ROWS = ("own", "every", "none")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("profile", "counts", "with_forced", "knowledge"),
    meta_fields=("program", "last_rows"),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodMask:
    """A mask function for `Transformer(..., mask_fn=...)`: a method of `METHODS` that keeps `counts[layer]` blocks.

    Counts are over a layer's query heads, as `hads.layer_counts` gives them. A pytree: new counts, another profile, new
    knowledge, and forced blocks or none, do not recompile.

    `last_rows` says who gives the last rows of blocks more weight, which helps answers that begin there:
    - "own": each method as it is: HADS's rule does (`Rule.last_weight`), rivals do not.
    - "every": a rival's last rows keep together as many blocks as HADS's last rows do, the best by its own priority.
    - "none": HADS's rule does not, either, and no row's masses are exact (`Rule.exact_queries`).
    """

    program: Callable[[Layer], Blocks | TokenMask | Remembered]
    profile: HadsProfile
    counts: Any
    with_forced: Any
    knowledge: Any = None
    last_rows: str = "own"

    @classmethod
    def of(
        cls,
        name: str,
        profile: HadsProfile,
        counts: Any,
        *,
        knowledge: Any = None,
        last_rows: str = "own",
    ) -> MethodMask:
        if last_rows not in LAST_ROWS:
            raise ValueError(f"{last_rows=} must be one of {', '.join(LAST_ROWS)}")
        method = METHODS[name]
        if last_rows == "none":
            like_others = dataclasses.replace(profile.rule, last_weight=1.0, exact_queries=0)
            profile = dataclasses.replace(profile, rule=like_others)
        return cls(
            program=method.program,
            profile=profile if method.adapt is None else method.adapt(profile),
            counts=jnp.asarray(counts, jnp.int32),
            with_forced=jnp.asarray(method.forced),
            knowledge=knowledge,
            last_rows=last_rows,
        )

    def blocks(self, layer: Any, query: Array, key: Array) -> Blocks:
        """The kept blocks. NotImplementedError for a method that needs more than a layer's blocks."""
        kept, memory = self.choose(layer, query, key)
        if isinstance(kept, TokenMask) or memory is not None:
            what = "single tokens" if isinstance(kept, TokenMask) else "from what layers before it chose"
            raise NotImplementedError(
                f"this method chooses {what}, and has no block mask of its own: use layerwise.run"
            )
        return kept

    def choose(self, layer: Any, query: Array, key: Array, memory: Any = None) -> tuple[Blocks | TokenMask, Any]:
        """A layer's choice, and its memory for the next layer; `memory` is the memory of the layer before."""
        grid = check_inputs(query, key, self.profile, layer)
        query, key = jax.lax.stop_gradient((query, key))
        count = self.counts[layer]
        x = Layer(query, key, grid, layer, count, self.profile, self.with_forced, self.knowledge, memory=memory)
        if self.last_rows == "every":
            x = with_last_rows(x)
        kept = self.program(x)
        return (kept.blocks, kept.memory) if isinstance(kept, Remembered) else (kept, None)

    def __call__(self, layer: Any, query: Array, key: Array) -> BlockMask:
        return causal_mask(self.blocks(layer, query, key), self.profile.grid(query.shape[1]))


def causal_mask(blocks: Blocks, grid: CausalGrid) -> BlockMask:
    sizes: dict[str, Any] = dict(block_q=grid.block_q, block_kv=grid.block, q_len=grid.length, kv_len=grid.length)
    return BlockMask.from_blocks(blocks, **sizes, is_causal=True, transpose=False)
