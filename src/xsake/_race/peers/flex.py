"""torch FlexAttention as a contestant, on the same masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import xsake
from xsake._race.course import Course
from xsake._race.peers import by_torch

_attend = torch.compile(flex_attention, dynamic=False)


def contestant(course: Course, mask: xsake.BlockMask) -> Callable[[], Any]:
    workload = course.workload
    lists = [x[None] for active in by_torch.tested_and_full(course, mask) for x in by_torch.compressed(active)]
    options: dict[str, Any] = dict(
        enable_gqa=workload.q_heads != workload.kv_heads,
        block_mask=BlockMask.from_kv_blocks(
            *lists,
            BLOCK_SIZE=(mask.block_q, mask.block_kv),
            mask_mod=(lambda b, h, q, k: q >= k) if workload.is_causal else None,
            seq_lengths=(workload.length, workload.kv_length or workload.length),
        ),
    )
    return by_torch.contestant(course, lambda q, k, v: _attend(q, k, v, **options), heads_first=True)
