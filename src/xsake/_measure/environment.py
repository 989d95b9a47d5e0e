"""Where things are measured: the device, the software versions, and the load and clocks of the machine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from importlib import metadata
from typing import Any

import jax

import xsake
from xsake._measure import nvidia_smi

_PACKAGES = ("jax", "jaxlib", "triton", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
_CLOCKS = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "celsius": "temperature.gpu", "watts": "power.draw"}


@dataclasses.dataclass(frozen=True)
class Facts:
    """The device and its environment, as seen by the process that holds the device."""

    device_kind: str
    platform: str
    environment: dict[str, Any]
    gpu: str | None = None  # by which `nvidia-smi` finds it

    @property
    def environment_id(self) -> str:
        """A short hash of `environment`."""
        return hashlib.sha256(json.dumps(self.environment, sort_keys=True).encode()).hexdigest()[:8]


def facts() -> Facts:
    device, gpu = jax.local_devices()[0], nvidia_smi.gpu_of_this_process()
    environment = {
        "versions": {"xsake": xsake.__version__} | {name: v for name in _PACKAGES if (v := _version(name))},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    if device.platform == "gpu":
        environment["driver"] = nvidia_smi.read(gpu, "driver_version")[0]
    if device.platform == "cpu":
        environment["processor"] = _processor()
    return Facts(device.device_kind, device.platform, environment, gpu)


def conditions(gpu: str | None) -> dict[str, Any]:
    """Load, and the GPU's clocks, temperature and power, at this moment, as far as the machine reports them."""
    found: dict[str, Any] = {"load": round(os.getloadavg()[0], 2)} if hasattr(os, "getloadavg") else {}
    values = nvidia_smi.read(gpu, *_CLOCKS.values())
    return found | {name: float(v) for name, v in zip(_CLOCKS, values, strict=True) if v and v[0].isdigit()}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or "unknown"
