"""The device that a call runs on."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def platform_of(array: Any) -> str:
    """The platform of a concrete array's device; while tracing, the default platform."""
    device = _device_of(array)
    return jax.default_backend() if device is None else device.platform


def device_kind(array: Any) -> str:
    """The kind of a concrete array's device; while tracing, of the default device."""
    device = _device_of(array)
    return (jax.local_devices()[0] if device is None else device).device_kind


def _device_of(array: Any) -> jax.Device | None:
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        return next(iter(array.devices()))
    return None


def on_host(array: Any) -> np.ndarray:
    """A concrete array as NumPy's. A device's is copied by an explicit transfer, which `jax.transfer_guard` allows."""
    return np.asarray(jax.device_get(array) if isinstance(array, jax.Array) else array)


def put_on_device(tree: Any) -> Any:
    """A tree of NumPy arrays, put on the device; while jit traces, the tree as it is.

    There the arrays become constants of the program, which XLA puts on the device. JAX would copy arrays that are on
    the device already back to the host when it lowers the program.
    """
    put = jax.device_put(tree)
    return tree if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(put)) else put


def compute_capability() -> str | None:
    """The compute capability of the first local GPU, such as "9.0"; None without a GPU of NVIDIA."""
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return None
    capability = str(getattr(device, "compute_capability", ""))
    return capability if capability.replace(".", "", 1).isdigit() else None


def core_count() -> int | None:
    """Streaming multiprocessors of the first local GPU; None without a GPU, or if JAX does not report them."""
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return None
    return getattr(device, "core_count", None)


def cpu_workers() -> int:
    """Threads of the pool in which XLA computes on the CPU: one per core or per CPU device, whichever number is larger.

    The cores are those that this process may use, or as many as NPROC says.
    """
    given = os.environ.get("NPROC", "")
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return max(int(given) if given.isdigit() else len(cores), len(jax.local_devices(backend="cpu")))


def on_gpu(kernels: Callable, otherwise: Callable, *args: Any) -> Any:
    """`kernels(*args)` where this is compiled for a GPU of compute capability 8.0 or above, else `otherwise(*args)`."""
    capability = compute_capability()
    if capability is None or float(capability) < 8.0:
        return otherwise(*args)
    return jax.lax.platform_dependent(*args, cuda=kernels, default=otherwise)
