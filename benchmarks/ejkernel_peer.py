"""ejkernel's native sparse attention as a contestant: the same chosen blocks, by its Triton kernels."""

from __future__ import annotations

from collections.abc import Callable

from ejkernel.kernels._triton.native_sparse_attention import apply_native_sparse_attention
from jax import Array

LAUNCHES = ((4, 1), (2, 1), (4, 2), (8, 2))  # warps and stages: its default, and what its own tuner tries
GROUP = 16


def unsupported(group: int) -> str | None:
    return None if group % GROUP == 0 else f"its kernels need a multiple of {GROUP} query heads per K/V head"


def variants(block_size: int) -> dict[str, Callable[[Array, Array, Array, Array], Array]]:
    return {f"{warps} warps, {stages} stages": _launched(block_size, warps, stages) for warps, stages in LAUNCHES}


def _launched(block_size: int, warps: int, stages: int) -> Callable[[Array, Array, Array, Array], Array]:
    def attend(query: Array, key: Array, value: Array, indices: Array) -> Array:
        return apply_native_sparse_attention(
            query,
            key,
            value,
            block_indices=indices,
            block_counts=indices.shape[-1],
            block_size=block_size,
            softmax_scale=query.shape[-1] ** -0.5,
            num_warps=warps,
            num_stages=stages,
        )

    return attend
