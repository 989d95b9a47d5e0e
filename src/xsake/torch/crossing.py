"""Tensors as JAX arrays and back, in the same memory (DLPack)."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import jax
import torch
from jax import Array
from jax._src.lib import _jax

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def to_jax(tensor: torch.Tensor) -> Array:
    """The contiguous tensor's memory as an array. torch must not write to it before a result of JAX is back.

    `jax.dlpack.from_dlpack` does the same in several times as much of the host's time, which a layer pays three times.
    """
    device, stream = _of_jax(tensor.device)
    with torch.cuda.device_of(tensor):  # JAX waits for the current stream of the current device
        shared = tensor.detach().__dlpack__(stream=stream)
    return _jax.dlpack_managed_tensor_to_buffer(shared, device, stream)


def to_torch(array: Array) -> torch.Tensor:
    """Waits, torch's stream or on a CPU the caller, until JAX has computed the array and read what it was made from."""
    return torch.from_dlpack(array)


@lru_cache
def _of_jax(device: torch.device) -> tuple[Any, int | None]:
    """JAX's device, and its stream that waits for others' arrays, which a CPU lacks."""
    if device.type == "cpu":
        return jax.local_devices(backend="cpu")[0], None
    found = next(x for x in jax.local_devices(backend="gpu") if x.local_hardware_id == (device.index or 0))
    return found, found.get_stream_for_external_ready_events()


@lru_cache
def check_device(device: torch.device) -> None:
    """ValueError if JAX does not compute on this device."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"xsake takes tensors on a CPU or on an NVIDIA GPU, and these are on {str(device)!r}: move them"
        )
    try:
        known = len(jax.local_devices(backend="cpu" if device.type == "cpu" else "gpu"))
    except RuntimeError:
        known = 0
    if (device.index or 0) >= known:
        raise ValueError(
            f"the tensors are on {str(device)!r}, and JAX has {', '.join(map(str, jax.devices()))} only: pip install "
            "'xsake[gpu]', and leave JAX_PLATFORMS unset"
        )


_said: set[str] = set()


def say_once(what: str) -> None:
    if what not in _said:
        _said.add(what)
        warnings.warn(what, RuntimeWarning, stacklevel=3)
