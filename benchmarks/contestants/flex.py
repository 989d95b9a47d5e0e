"""torch FlexAttention as a contestant, on the same masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import xsake
from xsake.autotune.workloads import Workload

_attend = torch.compile(flex_attention, dynamic=False)


def wait(result: Any) -> None:
    jax.block_until_ready(result)
    torch.cuda.synchronize()


def contestant(workload: Workload, mask: xsake.BlockMask, direction: str, calls: int) -> Callable[[], Any]:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        shape = (workload.batch, heads, workload.length, workload.head_dim)
        x = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        return x.requires_grad_(direction != "forward")

    q, k, v = draw(workload.q_heads), draw(workload.kv_heads), draw(workload.kv_heads)
    d_out = torch.randn_like(q)
    block_mask = _block_mask(workload, mask)
    grouped = workload.q_heads != workload.kv_heads

    def forward() -> torch.Tensor:
        return _attend(q, k, v, block_mask=block_mask, enable_gqa=grouped)

    def both() -> tuple:
        return torch.autograd.grad(forward(), (q, k, v), d_out)

    return graph(forward if direction == "forward" else both, calls)


def graph(run: Callable[[], Any], calls: int) -> Callable[[], Any]:
    """`calls` calls of `run` as one CUDA graph, so that Python's time to launch them is not measured.

    A graph knows its inputs by address alone: `run`, which holds them, lives as long as the graph. Otherwise the lists
    of the next contestant's mask may come to lie where this one's were.
    """
    if calls == 1:
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # compiles before the graph is recorded
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded, capture_error_mode="thread_local"):
        for _ in range(calls):
            result = run()

    def replay(_inputs: Callable[[], Any] = run) -> Any:
        recorded.replay()
        return result

    return replay


def _block_mask(workload: Workload, mask: xsake.BlockMask) -> BlockMask:
    """Blocks below the diagonal are full; blocks on it are tested element by element, as in our kernels."""
    blocks = np.asarray(mask.to_blocks())[0]
    diagonal = np.eye(blocks.shape[-1], dtype=bool) & workload.is_causal
    partial, full = blocks & diagonal, blocks & ~diagonal

    def lists(active: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        order = np.argsort(~active, axis=-1, kind="stable").astype(np.int32)
        return (
            torch.from_numpy(active.sum(-1, dtype=np.int32)).cuda()[None],
            torch.from_numpy(order).cuda()[None],
        )

    return BlockMask.from_kv_blocks(
        *lists(partial),
        *lists(full),
        BLOCK_SIZE=(workload.block, workload.block),
        mask_mod=(lambda b, h, q, k: q >= k) if workload.is_causal else None,
        seq_lengths=(workload.length, workload.length),
    )
