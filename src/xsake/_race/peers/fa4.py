"""FlashAttention-4 (CuTe DSL) as a contestant: dense, and block-sparse on the same masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
import torch
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import flash_attn_func

import xsake
from xsake._race.course import Course
from xsake._race.peers import by_torch


@cute.jit
def _causal(batch: Any, head: Any, q_index: Any, kv_index: Any, lengths: Any, aux: Any) -> Any:
    return kv_index <= q_index


def contestant(course: Course, mask: xsake.BlockMask | None, *, deterministic: bool = False) -> Callable[[], Any]:
    """Dense without a mask."""
    how = dict(causal=course.workload.is_causal) if mask is None else _lists(course, mask)
    return by_torch.contestant(course, lambda q, k, v: flash_attn_func(q, k, v, deterministic=deterministic, **how)[0])


def _lists(course: Course, mask: xsake.BlockMask) -> dict[str, Any]:
    def compressed(active: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Each batch entry has a copy: runs with one for all, at batch 4, ended in an illegal memory access."""
        count, order = by_torch.compressed(active)
        return count.repeat(course.workload.batch, 1, 1), order.repeat(course.workload.batch, 1, 1, 1)

    kinds = by_torch.tested_and_full(course, mask)
    rows = [x for active in kinds for x in compressed(active)]
    columns = [x for active in kinds for x in compressed(active.swapaxes(1, 2))]
    size = (mask.block_q, mask.block_kv)
    return dict(
        mask_mod=_causal if course.workload.is_causal else None,
        block_sparse_tensors=BlockSparseTensorsTorch(*rows, block_size=size),
        block_sparse_tensors_bwd=BlockSparseTensorsTorch(*columns, block_size=size),
    )
