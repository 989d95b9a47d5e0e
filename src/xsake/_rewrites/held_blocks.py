"""HeldBlocks: a dense call to a cache with room to spare, given lists of only the blocks that hold tokens."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from xsake._rewrites.rewrite import Rewrite
from xsake.backend.contract import Call


class HeldBlocks(Rewrite):
    """Every sequence has a list of its own. Forward only: there are no transposed lists."""

    @classmethod
    def of(cls, call: Call) -> HeldBlocks | None:
        """None where the mask has a rule: the rule is of indices, and the lists are short already."""
        return cls(call) if call.kv_segments is not None and call.mask.band == (None, None) else None

    @property
    def call(self) -> Call:
        given, mask, segments = self.given, self.given.mask, self.given.kv_segments
        assert segments is not None
        padded = jnp.pad(segments, ((0, 0), (0, -given.kv_len % mask.block_kv)), constant_values=-1)
        holds = (padded >= 0).reshape(given.batch, mask.num_kv_blocks, mask.block_kv).any(-1)
        last = jnp.where(holds, jnp.arange(1, mask.num_kv_blocks + 1, dtype=jnp.int32)[None], 0).max(1)
        rows = mask.num_q_blocks
        slot = jnp.arange(rows * mask.num_kv_blocks, dtype=jnp.int32)[None] % jnp.maximum(last, 1)[:, None]
        lists = dataclasses.replace(
            mask,
            kv_indices=slot[:, None],
            kv_row_ptr=(last[:, None] * jnp.arange(rows + 1, dtype=jnp.int32)[None])[:, None],
            kv_num_full=jnp.zeros((given.batch, 1, rows), jnp.int32),  # with segments, every block is tested
            q_indices=None,
            q_row_ptr=None,
            q_num_full=None,
            row_order=None,
            col_order=None,
        )
        return dataclasses.replace(given, mask=lists)
