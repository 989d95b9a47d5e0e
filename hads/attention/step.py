"""A few new tokens of sequences in a cache, in the blocks that they choose by the cache's pooled keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jax import Array

from xsake.hads.mask.block_mask import BlockMask
from xsake.hads.profile.causal_grid import blocks_back
from xsake.hads.profile.profile import HadsProfile
from xsake.hads.selection.chunk import LayerWeights
from xsake.hads.selection.pooled_keys import PooledKeys
from xsake.hads.selection.step.blocks import StepRule, forced_blocks, select_step, step_count
from xsake.hads.selection.step.mask import step_mask
from xsake.kernels_xla_ref.gathered import attend_blocks

NEW_TOKENS = 8  # that share their blocks


def forced_share_of_step(profile: HadsProfile, keys: int, tokens: int) -> float:
    """The share of the blocks of a cache of so many keys that is always on."""
    forced, inside = forced_blocks(-(-keys // profile.block), profile.rule, tokens=tokens, reach=_reach(profile))
    return forced / inside


@dataclasses.dataclass(frozen=True)
class Step:
    """The last tokens of each sequence in a cache, at a budget. A sequence of `shortest` tokens or fewer has too few
    blocks for the budget: some that are always on would be left out."""

    rule: StepRule
    shortest: int

    @classmethod
    def of(cls, profile: HadsProfile, budget: float, tokens: int, slots: int) -> Step:
        where: dict[str, Any] = dict(tokens=tokens, reach=_reach(profile))
        blocks, rule = -(-slots // profile.block), profile.rule
        room = step_count(blocks, profile.kv_heads, budget, rule, **where)
        forced, inside = forced_blocks(blocks, rule, **where)
        shortest = (min(math.ceil(forced / budget), inside) - 1) * profile.block
        return cls(StepRule(budget, room, profile.block, rule, tokens, profile.window), shortest)

    def attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        weights: LayerWeights,
        lengths: Array,
        pooled: PooledKeys | None,
        by_mask: Callable[[BlockMask], Any] | None,
    ) -> Any:
        """The output for queries of the usual scale: by `by_mask(mask)`, or from the blocks gathered out of the cache.
        Pooled keys that are not given are made from the whole cache."""
        block, slots = self.rule.block, key.shape[1]
        if pooled is None:
            blocks = -(-slots // block)
            pooled = PooledKeys.empty(batch=len(key), kv_heads=key.shape[2], blocks=blocks, head_dim=key.shape[3])
            pooled = pooled.write(key, lengths, start=0, block=block)
        if by_mask is not None:
            return by_mask(step_mask(query, pooled, weights, lengths, self.rule, slots=slots))
        chosen = select_step(query, pooled, weights, lengths, self.rule)
        out = attend_blocks(query, key, value, *chosen, lengths, block_size=block, window=self.rule.window)
        return out.astype(query.dtype)


def _reach(profile: HadsProfile) -> int | None:
    return None if profile.window is None else blocks_back(profile.window, profile.block)
