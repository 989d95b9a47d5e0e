"""Tensors as JAX arrays and back, in the same memory (DLPack)."""

from __future__ import annotations

import jax
import torch
from jax import Array

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def to_jax(tensor: torch.Tensor) -> Array:
    """The contiguous tensor's memory as an array. torch must not write to it before a result of JAX is back."""
    return jax.dlpack.from_dlpack(tensor.detach())


def to_torch(array: Array) -> torch.Tensor:
    """Waits, torch's stream or on a CPU the caller, until JAX has computed the array and read what it was made from."""
    return torch.from_dlpack(array)
