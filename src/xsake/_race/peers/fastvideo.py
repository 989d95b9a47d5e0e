"""FastVideo's block-sparse attention for Hopper (ThunderKittens) as a contestant: blocks of 64 x 64, nothing causal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fastvideo_kernel.block_sparse_attn import block_sparse_attn_sm90

import xsake
from xsake._race.course import Course
from xsake._race.peers import by_torch

BLOCK = 64


def contestant(course: Course, mask: xsake.BlockMask) -> Callable[[], Any]:
    """What its public function runs on Hopper; that one would run Triton's kernels where these lack.

    The backward makes the transposed lists anew in every call.
    """
    query, key, _ = (x.shape for x in course.inputs)
    shape = (query[0], query[2], query[1] // BLOCK, key[1] // BLOCK)
    count, order = by_torch.compressed(np.broadcast_to(np.asarray(mask.to_blocks()), shape))
    sizes = torch.full((shape[3],), BLOCK, dtype=torch.int32, device="cuda")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return block_sparse_attn_sm90(q, k, v, order, count, sizes)[0]

    return by_torch.contestant(course, attend, heads_first=True)
