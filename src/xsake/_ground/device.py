"""The device that a call runs on."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """What kernels ask of an NVIDIA GPU, by the names of a JAX device's attributes."""

    device_kind: str
    compute_capability: str  # such as "9.0"
    core_count: int | None  # streaming multiprocessors; None if JAX does not report them


# From the kind of a GPU that is not here, Pallas takes the capability alone, and it knows only some kinds.
_KINDS = {"8.0": "NVIDIA A100", "8.6": "NVIDIA A10", "8.9": "NVIDIA L4", "9.0": "NVIDIA H100", "10.0": "NVIDIA B200"}
_target: contextvars.ContextVar[Gpu | None] = contextvars.ContextVar("xsake_target", default=None)


@contextlib.contextmanager
def lowering_for(gpu: Gpu) -> Iterator[None]:
    """Inside the `with` block, programs are traced and lowered for `gpu`, in a process that need not have a GPU.

    The abstract mesh tells Pallas, and is part of the keys of JAX's caches: nothing traced for another GPU is found.
    """
    kind = _KINDS.get(gpu.compute_capability, gpu.device_kind)
    device = AbstractDevice(device_kind=kind, num_cores=gpu.core_count, platform="gpu")
    token = _target.set(gpu)
    try:
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            yield
    finally:
        _target.reset(token)


def target_gpu() -> Gpu | None:
    """The GPU of `lowering_for`, else the first local GPU; None without a GPU of NVIDIA."""
    if (target := _target.get()) is not None:
        return target
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return None
    capability = str(getattr(device, "compute_capability", ""))
    if not capability.replace(".", "", 1).isdigit():
        return None
    cores = getattr(device, "core_count", None)
    return Gpu(device_kind=device.device_kind, compute_capability=capability, core_count=cores)


def platform_of(array: Any) -> str:
    """The platform of a concrete array's device; while tracing, the default platform."""
    device = _device_of(array)
    if device is not None:
        return device.platform
    return jax.default_backend() if _target.get() is None else "gpu"


def device_kind(array: Any) -> str:
    """The kind of a concrete array's device; while tracing, of the default device."""
    device = _device_of(array) or _target.get() or jax.local_devices()[0]
    return device.device_kind


def memory_limit() -> int:
    """Bytes that JAX may take of the first device: on a CPU, all of the machine's."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return limit or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
    """The compute capability of `target_gpu`, such as "9.0"; None without a GPU of NVIDIA."""
    gpu = target_gpu()
    return None if gpu is None else gpu.compute_capability


def core_count() -> int | None:
    """Streaming multiprocessors of `target_gpu`; None without a GPU of NVIDIA, or if JAX does not report them."""
    gpu = target_gpu()
    return None if gpu is None else gpu.core_count


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
