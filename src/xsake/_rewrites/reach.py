"""Reach: a call without the blocks of keys past those that its queries may reach.

A chunk of a prompt attends to a cache of which most may be empty still, and some forwards copy all keys that they are
given.
"""

from __future__ import annotations

import dataclasses

from xsake._rewrites.rewrite import Rewrite
from xsake.backend.contract import Call


class Reach(Rewrite):
    def __init__(self, given: Call, end: int) -> None:
        super().__init__(given)
        self.end = end

    @classmethod
    def of(cls, call: Call) -> Reach | None:
        """None where all keys are reached, or lie in pages, which nobody copies."""
        block = call.mask.block_kv
        # At least two blocks: a configuration that was chosen for several blocks may not suit a single one.
        end = max(-(-call.kv_reach // block), 2) * block
        return None if end >= call.kv_len or call.page_table is not None else cls(call, end)

    @property
    def call(self) -> Call:
        given, end = self.given, self.end
        return dataclasses.replace(
            given,
            key=given.key[:, :end],
            value=given.value[:, :end],
            mask=dataclasses.replace(
                given.mask, kv_len=end, q_indices=None, q_row_ptr=None, q_num_full=None, col_order=None, q_bitmap=None
            ),
            bias=None if given.bias is None else given.bias[..., :end],
            kv_segments=None if given.kv_segments is None else given.kv_segments[:, :end],
            kv_positions=None if given.kv_positions is None else given.kv_positions[:, :end],
        )
