"""Tensors as JAX arrays and back, in the same memory (DLPack)."""

from __future__ import annotations

import warnings
from collections import deque
from functools import lru_cache
from typing import Any

import jax
import torch
from jax import Array
from jax._src.lib import _jax

_NO_WAIT = -1  # what the array API's standard calls it
_MOST_CALLS, _MOST_BYTES = 8, 1 << 26  # that are kept at least until they are computed, if the host is not far ahead
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def to_jax(tensor: torch.Tensor, *, waits: bool = True) -> Array:
    """The contiguous tensor's memory as an array. torch must not write to it before a result of JAX is back.

    A program that uses the array begins when torch has done all that was asked of it so far. One array that waits is
    enough for a program. (`jax.dlpack.from_dlpack` takes the host longer, and a layer has many arrays.)
    """
    device, stream = _of_jax(tensor.device)
    shared = tensor.detach().__dlpack__(stream=None if stream is None else _NO_WAIT)
    if stream is None or not waits:
        return _jax.dlpack_managed_tensor_to_buffer(shared, device, None)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    return _jax.dlpack_managed_tensor_to_buffer(shared, device, stream.cuda_stream)


def to_torch(array: Array) -> torch.Tensor:
    """Waits, torch's stream or on a CPU the caller, until JAX has computed the array and read what it was made from."""
    return torch.from_dlpack(array)


_calls: deque[tuple[int, Any]] = deque()


def keep_a_while(size: int, arrays: Any) -> None:
    """To let go of an array costs the host more while its program runs than afterwards. `size` is in bytes, about."""
    _calls.append((size, arrays))
    while len(_calls) > _MOST_CALLS or sum(size for size, _ in _calls) > _MOST_BYTES:
        _calls.popleft()


@lru_cache
def _of_jax(device: torch.device) -> tuple[Any, torch.cuda.ExternalStream | None]:
    """JAX's device, and its stream that waits for others' arrays, which a CPU lacks."""
    if device.type == "cpu":
        return jax.local_devices(backend="cpu")[0], None
    found = next(x for x in jax.local_devices(backend="gpu") if x.local_hardware_id == (device.index or 0))
    return found, torch.cuda.ExternalStream(found.get_stream_for_external_ready_events(), device=device)


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
