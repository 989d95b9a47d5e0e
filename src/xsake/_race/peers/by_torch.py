"""What contestants in torch share: a course's data as tensors, the lists of a mask, and calls as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

import xsake
from xsake._race.course import FORWARD, Course


def wait(result: Any) -> None:
    jax.block_until_ready(result)
    torch.cuda.synchronize()


def contestant(course: Course, attend: Callable[..., torch.Tensor], *, heads_first: bool = False) -> Callable[[], Any]:
    """The course's calls of `attend`, which takes query, key and value as [B, T, H, D], or as [B, H, T, D]."""

    def tensor(array: jax.Array) -> torch.Tensor:
        given = torch.from_dlpack(array)
        return given.transpose(1, 2).contiguous() if heads_first else given.clone()

    inputs = [tensor(array).requires_grad_(course.direction != FORWARD) for array in course.inputs]
    if course.direction == FORWARD:
        return graph(lambda: attend(*inputs), course.calls)
    d_out = tensor(course.cotangent)
    return graph(lambda: torch.autograd.grad(attend(*inputs), inputs, d_out), course.calls)


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


def tested_and_full(course: Course, mask: xsake.BlockMask) -> tuple[np.ndarray, np.ndarray]:
    """The mask's blocks, bool[H, rows, columns]: those on the causal diagonal are tested element by element, as in our
    kernels, and those below it are full."""
    blocks = np.asarray(mask.to_blocks())[0]
    blocks = np.broadcast_to(blocks, (course.workload.q_heads, *blocks.shape[1:]))
    first_query = np.arange(blocks.shape[1])[:, None] * mask.block_q
    last_key = np.arange(1, blocks.shape[2] + 1) * mask.block_kv - 1
    diagonal = (last_key > first_query) & course.workload.is_causal
    return blocks & diagonal, blocks & ~diagonal


def compressed(active: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row: (number of active blocks, indices of all blocks with the active blocks first)."""
    order = np.argsort(~active, axis=-1, kind="stable").astype(np.int32)
    count, order = (torch.from_numpy(np.ascontiguousarray(x)).cuda() for x in (active.sum(-1, dtype=np.int32), order))
    return count, order
