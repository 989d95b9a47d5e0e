"""FastVideo's block-sparse attention for Hopper (ThunderKittens) as a contestant: blocks of 64 x 64, nothing causal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from fastvideo_kernel.block_sparse_attn import block_sparse_attn_sm90

import xsake
from benchmarks.contestants.flex import graph

BLOCK = 64


def contestant(mask: xsake.BlockMask, direction: str, calls: int, *, inputs: Sequence[Any]) -> Callable[[], Any]:
    """`calls` calls of what its public function runs on Hopper; that one would run Triton's kernels where these lack.

    The backward makes the transposed lists anew in every call.
    """
    q, k, v = (torch.from_dlpack(x).transpose(1, 2).contiguous() for x in inputs)
    for x in (q, k, v):
        x.requires_grad_(direction != "forward")
    d_out = torch.randn_like(q)
    active = np.broadcast_to(np.asarray(mask.to_blocks()), (*q.shape[:2], q.shape[2] // BLOCK, k.shape[2] // BLOCK))
    order = np.argsort(~active, axis=-1, kind="stable").astype(np.int32)
    count, order = (torch.from_numpy(np.ascontiguousarray(x)).cuda() for x in (active.sum(-1, dtype=np.int32), order))
    sizes = torch.full((k.shape[2] // BLOCK,), BLOCK, dtype=torch.int32, device="cuda")

    def forward() -> torch.Tensor:
        return block_sparse_attn_sm90(q, k, v, order, count, sizes)[0]

    def both() -> tuple:
        return torch.autograd.grad(forward(), (q, k, v), d_out)

    return graph(forward if direction == "forward" else both, calls)
