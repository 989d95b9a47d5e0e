"""FlashAttention-4 (CuTe DSL) as a contestant: dense, and block-sparse on the same masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cutlass.cute as cute
import numpy as np
import torch
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import flash_attn_func

import xsake
from benchmarks.contestants.flex import graph
from xsake.autotune.workloads import Workload


@cute.jit
def _causal(batch: Any, head: Any, q_index: Any, kv_index: Any, lengths: Any, aux: Any) -> Any:
    return kv_index <= q_index


def contestant(
    workload: Workload,
    mask: xsake.BlockMask | None,
    direction: str,
    calls: int,
    *,
    deterministic: bool = False,
    inputs: Sequence[Any] | None = None,
    cotangent: Any = None,
) -> Callable[[], Any]:
    """`calls` calls on `inputs` and with `cotangent`, by default random data; dense without a mask."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int, dim: int) -> torch.Tensor:
        shape = (workload.batch, workload.length, heads, dim)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    dim, value_dim = workload.head_dim, workload.value_dim or workload.head_dim
    if inputs is None:
        given = [draw(workload.q_heads, dim), draw(workload.kv_heads, dim), draw(workload.kv_heads, value_dim)]
    else:
        given = [torch.from_dlpack(x).clone() for x in inputs]
    q, k, v = (x.requires_grad_(direction != "forward") for x in given)
    d_out = draw(workload.q_heads, value_dim) if cotangent is None else torch.from_dlpack(cotangent).clone()
    how = dict(causal=workload.is_causal) if mask is None else _lists(workload, mask)

    def forward() -> torch.Tensor:
        return flash_attn_func(q, k, v, deterministic=deterministic, **how)[0]

    def both() -> tuple:
        return torch.autograd.grad(forward(), (q, k, v), d_out)

    return graph(forward if direction == "forward" else both, calls)


def _lists(workload: Workload, mask: xsake.BlockMask) -> dict[str, Any]:
    """Blocks below the diagonal are full; blocks on it are tested element by element, as in our kernels."""
    blocks = np.asarray(mask.to_blocks())[0]
    blocks = np.broadcast_to(blocks, (workload.q_heads, *blocks.shape[1:]))
    first_query = np.arange(blocks.shape[1])[:, None] * mask.block_q
    last_key = np.arange(1, blocks.shape[2] + 1) * mask.block_kv - 1
    diagonal = (last_key > first_query) & workload.is_causal
    tested, full = blocks & diagonal, blocks & ~diagonal
    rows = [x for active in (tested, full) for x in _compressed(active, workload.batch)]
    columns = [x for active in (tested, full) for x in _compressed(active.swapaxes(1, 2), workload.batch)]
    size = (mask.block_q, mask.block_kv)
    return dict(
        mask_mod=_causal if workload.is_causal else None,
        block_sparse_tensors=BlockSparseTensorsTorch(*rows, block_size=size),
        block_sparse_tensors_bwd=BlockSparseTensorsTorch(*columns, block_size=size),
    )


def _compressed(active: np.ndarray, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row: (number of active blocks, indices of all blocks with the active ones first).

    Each batch entry has a copy: runs with one for all, at batch 4, ended in an illegal memory access.
    """
    order = np.argsort(~active, axis=-1, kind="stable").astype(np.int32)
    count, order = (torch.from_numpy(x).cuda() for x in (active.sum(-1, dtype=np.int32), order))
    return count.repeat(batch, 1, 1), order.repeat(batch, 1, 1, 1)
