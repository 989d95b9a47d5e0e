"""ejkernel's native sparse attention as a contestant: the same chosen blocks, by its Triton kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from ejkernel.kernels._triton.native_sparse_attention import apply_native_sparse_attention
from jax import Array

LAUNCHES = ((4, 1), (2, 1), (4, 2), (8, 2))  # warps and stages: its default, and what its own tuner tries
GROUP = 16
_BACKWARD = "ejkernel.kernels._triton.native_sparse_attention._triton_impl_bwd"

Attend = Callable[[Array, Array, Array, Array], Array]


def unsupported(group: int) -> str | None:
    return None if group % GROUP == 0 else f"its kernels need a multiple of {GROUP} query heads per K/V head"


def variants(block_size: int) -> dict[str, Attend]:
    return {f"{warps} warps, {stages} stages": _launched(block_size, warps, stages) for warps, stages in LAUNCHES}


def mended(block_size: int) -> dict[str, Attend]:
    """`variants` whose backward can be compiled.

    ejkernel 0.0.80.3 counts the rows of a launch with jnp.prod. Under jit this gives a tracer, where a launch needs a
    number. Here NumPy counts them, and nothing else is changed.
    """
    return {name: _mended(attend) for name, attend in variants(block_size).items()}


def _launched(block_size: int, warps: int, stages: int) -> Attend:
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


class _Numbers:
    """jax.numpy, but for the two functions that count."""

    array = staticmethod(np.array)
    prod = staticmethod(lambda x: int(np.prod(x)))

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)


def _mended(attend: Attend) -> Attend:
    def forward(query: Array, key: Array, value: Array, indices: Array) -> tuple[Array, Any]:
        return jax.vjp(lambda *qkv: attend(*qkv, indices), query, key, value)

    def backward(of_ejkernel: Any, d_out: Array) -> tuple[Any, ...]:
        with mock.patch.object(importlib.import_module(_BACKWARD), "jnp", _Numbers()):
            return (*of_ejkernel(d_out), None)

    function = jax.custom_vjp(attend)
    function.defvjp(forward, backward)
    return function
